// What the bindings see of a torch tensor: pointer, shape, strides, dtype and device, read through Python attributes.
// No torch header and no link to torch: one build serves every torch version.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace d3s {
namespace py = pybind11;

struct Tensor {
  std::string name;  // of the argument, for messages
  void* data;
  std::string dtype, device;
  std::vector<int64_t> shape, strides;

  int64_t size(int dim) const { return shape[dim]; }
};

// Reads any strided tensor; raises ValueError for anything else.
Tensor read_tensor(const py::handle& object, const char* name);

template <class T>
struct Vector {
  T* data;
  int64_t size;
};

// A dense one-dimensional CPU tensor of the dtype, of any length and of one length.
template <class T>
Vector<T> read_any(const py::handle& object, const char* name, const char* dtype);
template <class T>
T* read_vector(const py::handle& object, const char* name, const char* dtype, int64_t length);

// Raises ValueError("name is value; remedy").
[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& remedy);

// The same of "name[at]".
[[noreturn]] void refuse_entry(const char* name, int64_t at, double value, const char* remedy);

std::string show(const std::vector<int64_t>& numbers);

}  // namespace d3s
