#include "d3s/row_stats.hpp"

#include "tensor.hpp"

using namespace d3s;

namespace {

Logits read_logits(const py::object& object, const char* name) {
  const Tensor t = read_tensor(object, name);
  if (t.device != "cpu") refuse(name, "on " + t.device, "this kernel runs on the CPU");
  if (t.shape.size() != 2) refuse(name, "of shape " + show(t.shape), "pass [tokens, columns]");
  Logits x{};
  if (t.dtype == "float32") x.dtype = Dtype::f32;
  else if (t.dtype == "bfloat16") x.dtype = Dtype::bf16;
  else if (t.dtype == "float16") x.dtype = Dtype::f16;
  else refuse(name, "of dtype " + t.dtype, "pass float32, bfloat16 or float16");
  const bool dense = t.size(1) <= 1 || t.strides[1] == 1;
  if (!dense || (t.size(0) > 1 && t.strides[0] < t.size(1)))
    refuse(name, "of strides " + show(t.strides), "columns must be adjacent and rows apart");
  x.data = t.data;
  x.rows = t.size(0);
  x.columns = t.size(1);
  x.row_stride = x.rows > 1 ? t.strides[0] : t.size(1);
  return x;
}

void check_valid(int64_t num_valid, const Logits& x, double c, int threads) {
  if (num_valid < 0 || num_valid > x.columns)
    refuse("num_valid", std::to_string(num_valid), "there are " + std::to_string(x.columns) + " columns");
  if (!(c > 0) || !std::isfinite(c)) refuse("inv_temperature", std::to_string(c), "pass a positive number");
  if (threads < 1) refuse("threads", std::to_string(threads), "pass 1 or more");
}

}  // namespace

void bind_row_stats(py::module_& m) {
  m.def("row_stats", [](const py::object& logits, const py::object& local_targets, int64_t num_valid, double c,
                        const py::object& state, const py::object& target, int threads) {
    const Logits x = read_logits(logits, "logits");
    const int64_t* y = read_vector<int64_t>(local_targets, "local_targets", "int64", x.rows);
    double* stats = read_vector<double>(state, "state", "float64", 3 * x.rows);
    double* t = read_vector<double>(target, "target", "float64", x.rows);
    check_valid(num_valid, x, c, threads);
    py::gil_scoped_release release;
    row_stats(x, y, num_valid, static_cast<float>(c), stats, t, threads);
  });
  m.def(
      "row_backward", [](const py::object& logits, const py::object& out, const py::object& local_targets,
                         int64_t num_valid, double c, const py::object& m, const py::object& log_z,
                         const py::object& entropy, const py::object& grad_lp, const py::object& grad_h, int threads) {
        const Logits x = read_logits(logits, "logits"), to = read_logits(out, "out");
        if (to.rows != x.rows || to.columns != x.columns || to.dtype != x.dtype)
          refuse("out", "of shape (" + std::to_string(to.rows) + ", " + std::to_string(to.columns) + ")",
                 "shape and dtype must be the logits'");
        const int64_t* y = read_vector<int64_t>(local_targets, "local_targets", "int64", x.rows);
        RowGrads g{read_vector<float>(m, "m", "float32", x.rows), read_vector<float>(log_z, "log_z", "float32", x.rows),
                   read_vector<float>(entropy, "entropy", "float32", x.rows),
                   read_vector<float>(grad_lp, "grad_log_prob", "float32", x.rows),
                   grad_h.is_none() ? nullptr : read_vector<float>(grad_h, "grad_entropy", "float32", x.rows)};
        check_valid(num_valid, x, c, threads);
        py::gil_scoped_release release;
        row_backward(x, to, y, num_valid, static_cast<float>(c), g, threads);
      });
}
