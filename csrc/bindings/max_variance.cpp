#include "d3s/max_variance.hpp"

#include "tensor.hpp"

using namespace d3s;

void bind_max_variance(py::module_& m) {
  m.def("max_variance_subset", [](const py::object& values, int64_t m, const py::object& tie_key,
                                  const py::object& segments, const py::object& mask) {
    const int64_t n = [&] {
      const Tensor t = read_tensor(values, "values");
      if (t.shape.size() != 1) refuse("values", "of shape " + show(t.shape), "pass one dimension");
      return t.size(0);
    }();
    const double* x = read_vector<double>(values, "values", "float64", n);
    const int64_t* key = read_vector<int64_t>(tie_key, "tie_key", "int64", n);
    const int64_t* segment = segments.is_none() ? nullptr : read_vector<int64_t>(segments, "segments", "int64", n);
    uint8_t* out = read_vector<uint8_t>(mask, "mask", "bool", n);
    if (m < 0) refuse("m", std::to_string(m), "pass the number of values to keep");
    int64_t bad;
    {
      py::gil_scoped_release release;
      bad = max_variance::select_segments(x, key, segment, n, m, out);
    }
    if (bad >= 0)
      throw py::value_error("values[" + std::to_string(bad) +
                            "]=" + py::cast<std::string>(py::str(py::float_(x[bad]))) +
                            "; take rows that are not finite out before selection");
  });
}
