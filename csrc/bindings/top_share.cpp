#include "d3s/top_share.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "tensor.hpp"

using namespace d3s;

namespace {

constexpr int64_t BINS = int64_t{1} << TopShare::FIRST_BITS;

// A fresh mask of 100 MB costs 25,000 page faults in small pages and 50 in large ones. The last page may reach past the
// mask: the advice is a hint that changes no content.
void ask_for_large_pages(uint8_t* data, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = uintptr_t{1} << 21;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + size + PAGE - 1) / PAGE * PAGE;
  if (from < to && size > (4 << 20))
    madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // a hint: failure changes nothing
#else
  (void)data;
  (void)size;
#endif
}

// Keeps the tensors alive for as long as pointers into them are held.
struct Selector {
  py::object scores, uid, position, mask;
  int64_t n;
  TopShare top;
  bool is_split = false;  // and not yet written

  Selector(py::object scores_, py::object uid_, py::object position_, int threads)
      : Selector(read_any<float>(scores_, "scores", "float32"), scores_, uid_, position_, threads) {}

  Selector(Vector<float> x, py::object scores_, py::object uid_, py::object position_, int threads)
      : scores(std::move(scores_)),
        uid(std::move(uid_)),
        position(std::move(position_)),
        n(x.size),
        top(x.data, read_vector<int64_t>(uid, "uid", "int64", n),
            read_vector<int64_t>(position, "position", "int64", n), n, threads) {}

  void need_split() const {
    if (!is_split) throw py::value_error("TopShare: split() comes first");
  }
};

}  // namespace

void bind_top_share(py::module_& m) {
  py::class_<Selector>(m, "TopShare")
      .def(py::init([](const py::object& scores, const py::object& uid, const py::object& position, int threads) {
        if (threads < 1) refuse("threads", std::to_string(threads), "pass 1 or more");
        return new Selector(scores, uid, position, threads);
      }))
      .def("sample",
           [](Selector& s, const py::object& out) {
             int64_t* counts = read_vector<int64_t>(out, "out", "int64", BINS);
             py::gil_scoped_release release;
             return s.top.sample(counts);
           })
      .def("refine",
           [](Selector& s, uint32_t low, uint32_t high, const py::object& out) {
             int64_t* counts = read_vector<int64_t>(out, "out", "int64", 2 * BINS);
             py::gil_scoped_release release;
             s.top.refine(low, high, counts);
           })
      .def("split",
           [](Selector& s, uint32_t low, uint32_t high, const py::object& mask, const py::object& out) {
             uint8_t* kept = mask.is_none() ? nullptr : read_vector<uint8_t>(mask, "mask", "bool", s.n);
             int64_t* counts = read_vector<int64_t>(out, "out", "int64", 3);
             if (low < LEAST_KEY || high > LARGEST_KEY || low > high)
               refuse("bracket", "[" + std::to_string(low) + ", " + std::to_string(high) + "]",
                      "pass keys of finite floats");
             s.mask = mask;
             py::gil_scoped_release release;
             if (kept) ask_for_large_pages(kept, s.n);
             s.top.split(low, high, kept, counts);
             s.is_split = true;
           })
      .def("count_broken",
           [](Selector& s, const py::object& out) {
             int64_t* counts = read_vector<int64_t>(out, "out", "int64", 2);
             py::gil_scoped_release release;
             s.top.count_broken(counts);
           })
      .def("look_at_keys", [](Selector& s) { s.top.look_at_keys(); })
      .def("look_at_uids", [](Selector& s, int64_t key) { s.top.look_at_uids(key); })
      .def("look_at_positions", [](Selector& s, int64_t uid) { s.top.look_at_positions(uid); })
      .def("narrow",
           [](Selector& s, int64_t first, int64_t last) {
             s.need_split();
             py::gil_scoped_release release;
             s.top.narrow(first, last);
           })
      .def("ends",
           [](Selector& s, const py::object& out) {
             int64_t* ends = read_vector<int64_t>(out, "out", "int64", 2);
             s.need_split();
             py::gil_scoped_release release;
             s.top.ends(ends);
           })
      .def("counts",
           [](Selector& s, int64_t first, int shift, const py::object& out) {
             const auto counts = read_any<int64_t>(out, "out", "int64");
             s.need_split();
             if (shift < 0 || shift > 63) refuse("shift", std::to_string(shift), "pass 0 to 63");
             bool fits;
             {
               py::gil_scoped_release release;
               fits = s.top.counts(first, shift, counts.data, counts.size);
             }
             if (!fits)
               refuse("out", "of length " + std::to_string(counts.size), "too short for these values and this shift");
           })
      .def("write", [](Selector& s, int64_t key, int64_t tie_uid, int64_t tie_position) {
        s.need_split();
        if (s.mask.is_none()) throw py::value_error("TopShare: write() needs a split() that was given a mask");
        s.is_split = false;
        py::gil_scoped_release release;
        s.top.write(key, tie_uid, tie_position);
      });
  m.def("key_of", [](float x) { return key_of(x); });
  m.def("score_of", [](uint32_t key) { return score_of(key); });
}
