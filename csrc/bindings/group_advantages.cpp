#include "d3s/group_advantages.hpp"

#include "tensor.hpp"

using namespace d3s;

void bind_group_advantages(py::module_& m) {
  m.def("group_advantages", [](const py::object& rewards, const py::object& group_ids, const py::object& kept,
                               bool normalize, const py::object& out) {
    const auto x = read_any<double>(rewards, "rewards", "float64");
    const int64_t* group = read_vector<int64_t>(group_ids, "group_ids", "int64", x.size);
    const uint8_t* use = read_vector<uint8_t>(kept, "kept", "bool", x.size);
    double* to = read_vector<double>(out, "out", "float64", x.size);
    int64_t bad;
    {
      py::gil_scoped_release release;
      bad = group_advantages::all_groups(x.data, group, use, x.size, normalize, to);
    }
    if (bad >= 0) refuse_entry("rewards", bad, x.data[bad], "take rollouts without a finite reward out before");
  });
}
