#include "tensor.hpp"

namespace d3s {

void refuse(const std::string& name, const std::string& value, const std::string& remedy) {
  throw py::value_error(name + " is " + value + "; " + remedy);
}

std::string show(const std::vector<int64_t>& numbers) {
  std::string text = "(";
  for (size_t i = 0; i < numbers.size(); i++) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + ")";
}

// str(object) of a dtype, device or layout, less "torch.". Each is made once: a held object keeps its address.
static std::string text_of(const py::object& object) {
  static auto& known = *new std::vector<std::pair<py::object, std::string>>;
  for (const auto& [seen, text] : known)
    if (seen.is(object)) return text;
  auto text = py::cast<std::string>(py::str(object));
  if (text.rfind("torch.", 0) == 0) text = text.substr(6);
  if (known.size() < 64) known.emplace_back(object, text);
  return text;
}

Tensor read_tensor(const py::handle& object, const char* name) {
  static constexpr const char* NAMES[] = {"dtype", "device", "layout", "shape", "is_neg", "stride", "data_ptr"};
  py::object found[7];
  for (int i = 0; i < 7; i++) {
    found[i] = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), NAMES[i]));
    if (found[i]) continue;
    PyErr_Clear();
    refuse(name, "a " + py::cast<std::string>(py::str(py::type::of(object).attr("__name__"))), "pass a torch tensor");
  }
  const auto& [dtype, device, layout, shape, is_neg, stride, data_ptr] = found;
  Tensor t;
  t.name = name;
  t.dtype = text_of(dtype);
  t.device = text_of(device);
  if (text_of(layout) != "strided") refuse(name, text_of(layout), "pass a dense tensor");
  if (t.device == "meta") refuse(name, "a meta tensor without data", "pass a CPU or CUDA tensor");
  if (py::cast<bool>(is_neg())) refuse(name, "a lazily negated view", "pass tensor.resolve_neg()");
  for (const auto& size : shape) t.shape.push_back(py::cast<int64_t>(size));
  for (const auto& step : stride()) t.strides.push_back(py::cast<int64_t>(step));
  t.data = reinterpret_cast<void*>(py::cast<uintptr_t>(data_ptr()));
  return t;
}

template <class T>
T* read_vector(const py::handle& object, const char* name, const char* dtype, int64_t length) {
  const Tensor t = read_tensor(object, name);
  if (t.device != "cpu") refuse(name, "on " + t.device, "this op runs on the CPU; call tensor.cpu()");
  if (t.dtype != dtype) refuse(name, "of dtype " + t.dtype, std::string("pass ") + dtype);
  if (t.shape.size() != 1) refuse(name, "of shape " + show(t.shape), "pass one dimension");
  if (t.size(0) > 1 && t.strides[0] != 1) refuse(name, "of stride " + show(t.strides), "call tensor.contiguous()");
  if (length >= 0 && t.size(0) != length)
    refuse(name, "of length " + std::to_string(t.size(0)), std::to_string(length) + " entries are needed");
  return static_cast<T*>(t.data);
}

template float* read_vector<float>(const py::handle&, const char*, const char*, int64_t);
template double* read_vector<double>(const py::handle&, const char*, const char*, int64_t);
template int64_t* read_vector<int64_t>(const py::handle&, const char*, const char*, int64_t);
template uint8_t* read_vector<uint8_t>(const py::handle&, const char*, const char*, int64_t);

}  // namespace d3s
