#include "d3s/max_variance.hpp"

#include "tensor.hpp"

using namespace d3s;

void bind_max_variance(py::module_& m) {
  m.def("max_variance_subset", [](const py::object& values, int64_t m, const py::object& tie_key,
                                  const py::object& segments, const py::object& mask) {
    const auto x = read_any<double>(values, "values", "float64");
    const int64_t n = x.size;
    const int64_t* key = read_vector<int64_t>(tie_key, "tie_key", "int64", n);
    const int64_t* segment = segments.is_none() ? nullptr : read_vector<int64_t>(segments, "segments", "int64", n);
    uint8_t* out = read_vector<uint8_t>(mask, "mask", "bool", n);
    if (m < 0) refuse("m", std::to_string(m), "pass the number of values to keep");
    int64_t bad;
    {
      py::gil_scoped_release release;
      bad = max_variance::select_segments(x.data, key, segment, n, m, out);
    }
    if (bad >= 0) refuse_entry("values", bad, x.data[bad], "take rows that are not finite out before selection");
  });
}
