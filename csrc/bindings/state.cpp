#include <pybind11/pybind11.h>

#include "d3s/kernels.hpp"

namespace py = pybind11;

void bind_state(py::module_& m) {
  m.attr("INTERFACE") = D3S_INTERFACE;
  m.def("state", [] {
    py::dict state;
    state["instruction set"] = d3s::kernels().name;
    state["supported"] = d3s::supported_kernels();
    state["CUDA"] = D3S_CUDA_STATE;
    state["compiler"] = D3S_COMPILER;
    return state;
  });
  m.def("choose_instruction_set", [](const std::string& name) {
    if (!d3s::choose_kernels(name.c_str()))
      throw py::value_error("instruction set " + name + "; this processor has: " + d3s::supported_kernels());
  });
}
