// Registers the ops, nothing else.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_state(py::module_& m);
void bind_max_variance(py::module_& m);
void bind_top_share(py::module_& m);
void bind_row_stats(py::module_& m);
void bind_packing(py::module_& m);
void bind_group_advantages(py::module_& m);
#if defined(D3S_WITH_CUDA)
void bind_cuda(py::module_& m);
#endif

PYBIND11_MODULE(_ext, m) {
  m.doc() = "Compiled ops of d3s_megatron; use d3s_megatron.ops, which checks and dispatches.";
  bind_state(m);
  bind_max_variance(m);
  bind_top_share(m);
  bind_row_stats(m);
  bind_packing(m);
  bind_group_advantages(m);
#if defined(D3S_WITH_CUDA)
  bind_cuda(m);
#endif
}
