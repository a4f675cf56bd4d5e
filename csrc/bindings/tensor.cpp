#include "tensor.hpp"

#include <deque>

namespace d3s {

void refuse(const std::string& name, const std::string& value, const std::string& remedy) {
  throw py::value_error(name + " is " + value + "; " + remedy);
}

void refuse_entry(const char* name, int64_t at, double value, const char* remedy) {
  const auto shown = py::cast<std::string>(py::str(py::float_(value)));
  throw py::value_error(name + ("[" + std::to_string(at) + "]=" + shown) + "; " + remedy);
}

std::string show(const std::vector<int64_t>& numbers) {
  std::string text = "(";
  for (size_t i = 0; i < numbers.size(); i++) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + ")";
}

// str(object) of a dtype, device or layout, less "torch.". Each is made once: an object that is held keeps its address;
// a device is another object at every look, but equal to the one seen before.
static const std::string& text_of(const py::object& object) {
  static auto& known = *new std::deque<std::pair<py::object, std::string>>;
  static std::string other;
  for (const auto& [seen, text] : known)
    if (seen.is(object)) return text;
  for (const auto& [seen, text] : known)
    if (Py_TYPE(seen.ptr()) == Py_TYPE(object.ptr()) && seen.equal(object)) return text;
  other = py::cast<std::string>(py::str(object));
  if (other.rfind("torch.", 0) == 0) other = other.substr(6);
  if (known.size() >= 64) return other;
  return known.emplace_back(object, other).second;
}

static void read_numbers(const py::object& numbers, std::vector<int64_t>& out) {
  if (!PyTuple_Check(numbers.ptr())) {
    for (const auto& number : numbers) out.push_back(py::cast<int64_t>(number));
    return;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers.ptr()); i++) {
    out.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(numbers.ptr(), i)));
    if (out.back() == -1 && PyErr_Occurred()) throw py::error_already_set();
  }
}

Tensor read_tensor(const py::handle& object, const char* name) {
  // Interned names and calls without bound methods: a small op reads its tensors in a microsecond or two.
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  static PyObject* const device = PyUnicode_InternFromString("device");
  static PyObject* const layout = PyUnicode_InternFromString("layout");
  static PyObject* const shape = PyUnicode_InternFromString("shape");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const stride = PyUnicode_InternFromString("stride");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  auto found = [&](PyObject* result) {
    if (result) return py::reinterpret_steal<py::object>(result);
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
    refuse(name, "a " + py::cast<std::string>(py::str(py::type::of(object).attr("__name__"))), "pass a torch tensor");
  };
  auto get = [&](PyObject* attribute) { return found(PyObject_GetAttr(object.ptr(), attribute)); };
  auto call = [&](PyObject* method) { return found(PyObject_CallMethodNoArgs(object.ptr(), method)); };
  Tensor t;
  t.name = name;
  t.dtype = text_of(get(dtype));
  t.device = text_of(get(device));
  const std::string& kind = text_of(get(layout));
  if (kind != "strided") refuse(name, kind, "pass a dense tensor");
  if (t.device == "meta") refuse(name, "a meta tensor without data", "pass a CPU or CUDA tensor");
  if (py::cast<bool>(call(is_neg))) refuse(name, "a lazily negated view", "pass tensor.resolve_neg()");
  read_numbers(get(shape), t.shape);
  read_numbers(call(stride), t.strides);
  t.data = reinterpret_cast<void*>(py::cast<uintptr_t>(call(data_ptr)));
  return t;
}

template <class T>
Vector<T> read_any(const py::handle& object, const char* name, const char* dtype) {
  const Tensor t = read_tensor(object, name);
  if (t.device != "cpu") refuse(name, "on " + t.device, "this op runs on the CPU; call tensor.cpu()");
  if (t.dtype != dtype) refuse(name, "of dtype " + t.dtype, std::string("pass ") + dtype);
  if (t.shape.size() != 1) refuse(name, "of shape " + show(t.shape), "pass one dimension");
  if (t.size(0) > 1 && t.strides[0] != 1) refuse(name, "of stride " + show(t.strides), "call tensor.contiguous()");
  return {static_cast<T*>(t.data), t.size(0)};
}

template <class T>
T* read_vector(const py::handle& object, const char* name, const char* dtype, int64_t length) {
  const Vector<T> v = read_any<T>(object, name, dtype);
  if (v.size != length)
    refuse(name, "of length " + std::to_string(v.size), std::to_string(length) + " entries are needed");
  return v.data;
}

template Vector<float> read_any<float>(const py::handle&, const char*, const char*);
template Vector<double> read_any<double>(const py::handle&, const char*, const char*);
template Vector<int64_t> read_any<int64_t>(const py::handle&, const char*, const char*);
template float* read_vector<float>(const py::handle&, const char*, const char*, int64_t);
template double* read_vector<double>(const py::handle&, const char*, const char*, int64_t);
template int64_t* read_vector<int64_t>(const py::handle&, const char*, const char*, int64_t);
template uint8_t* read_vector<uint8_t>(const py::handle&, const char*, const char*, int64_t);

}  // namespace d3s
