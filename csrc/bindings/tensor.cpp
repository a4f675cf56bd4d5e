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

Tensor read_tensor(const py::handle& object, const char* name) {
  for (const char* attribute : {"data_ptr", "stride", "layout", "is_neg", "device"}) {
    if (!py::hasattr(object, attribute))
      refuse(name, "a " + py::cast<std::string>(py::str(py::type::of(object).attr("__name__"))), "pass a torch tensor");
  }
  Tensor t;
  t.name = name;
  t.dtype = py::cast<std::string>(py::str(object.attr("dtype")));
  if (t.dtype.rfind("torch.", 0) == 0) t.dtype = t.dtype.substr(6);
  t.device = py::cast<std::string>(py::str(object.attr("device")));
  const auto layout = py::cast<std::string>(py::str(object.attr("layout")));
  if (layout != "torch.strided") refuse(name, layout, "pass a dense tensor");
  if (t.device == "meta") refuse(name, "a meta tensor without data", "pass a CPU or CUDA tensor");
  if (py::cast<bool>(object.attr("is_neg")())) refuse(name, "a lazily negated view", "pass tensor.resolve_neg()");
  for (const auto& size : object.attr("shape")) t.shape.push_back(py::cast<int64_t>(size));
  for (const auto& stride : object.attr("stride")()) t.strides.push_back(py::cast<int64_t>(stride));
  t.data = reinterpret_cast<void*>(py::cast<uintptr_t>(object.attr("data_ptr")()));
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
