#include "d3s/packing.hpp"

#include "tensor.hpp"

using namespace d3s;

void bind_packing(py::module_& m) {
  m.def("first_fit", [](const py::object& lengths, int64_t capacity, const py::object& bin) {
    const auto [x, n] = read_any<int64_t>(lengths, "lengths", "int64");
    int64_t* out = read_vector<int64_t>(bin, "bin", "int64", n);
    for (int64_t i = 0; i < n; i++)
      if (x[i] < 0 || x[i] > capacity)
        refuse("lengths[" + std::to_string(i) + "]", std::to_string(x[i]),
               "a bin holds 0 to " + std::to_string(capacity));
    py::gil_scoped_release release;
    return first_fit(x, n, capacity, out);
  });
  m.def("balanced_partition", [](const py::object& lengths, int64_t num_parts, bool equal_count,
                                 const py::object& part) {
    const auto [x, n] = read_any<int64_t>(lengths, "lengths", "int64");
    int64_t* out = read_vector<int64_t>(part, "part", "int64", n);
    if (num_parts < 1 || num_parts > (int64_t{1} << 20))
      refuse("num_parts", std::to_string(num_parts), "pass 1 to 2^20");
    if (equal_count && n % num_parts) refuse("lengths", "of length " + std::to_string(n), "it must divide evenly");
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++)
      if (x[i] < 0 || __builtin_add_overflow(total, x[i], &total))
        refuse("lengths[" + std::to_string(i) + "]", std::to_string(x[i]), "lengths are 0 or more, their sum in int64");
    py::gil_scoped_release release;
    balanced_partition(x, n, num_parts, equal_count ? num_parts : 1, out);
  });
}
