// Bindings of the CUDA kernels: tensors of one device, work queued on torch's current stream.
#include "../cuda/api.hpp"

#include <cmath>
#include <tuple>

#include "tensor.hpp"

using namespace d3s;

namespace {

// The device and stream of a call; every tensor must be on the device.
struct Place {
  std::string device;
  int index;

  explicit Place(const py::object& tensor, const char* name) {
    device = read_tensor(tensor, name).device;
    if (device.rfind("cuda:", 0) != 0) refuse(name, "on " + device, "this kernel runs on a CUDA device");
    index = std::stoi(device.substr(5));
  }

  // Asked for last, when all arguments are known to be right.
  uintptr_t stream() const {
    const py::object current = py::module_::import("torch").attr("cuda").attr("current_stream")(index);
    return py::cast<uintptr_t>(current.attr("cuda_stream"));
  }

  Tensor tensor(const py::object& object, const char* name, size_t dims) const {
    Tensor t = read_tensor(object, name);
    if (t.device != device) refuse(name, "on " + t.device, "the other tensors are on " + device);
    if (t.shape.size() != dims)
      refuse(name, "of shape " + show(t.shape), "pass " + std::to_string(dims) + " dimensions");
    return t;
  }

  template <class T>
  T* vector(const py::object& object, const char* name, const char* dtype, int64_t length,
            bool at_least = false) const {
    const Tensor t = tensor(object, name, 1);
    if (t.dtype != dtype) refuse(name, "of dtype " + t.dtype, std::string("pass ") + dtype);
    if (t.size(0) > 1 && t.strides[0] != 1) refuse(name, "of stride " + show(t.strides), "call tensor.contiguous()");
    if (at_least ? t.size(0) < length : t.size(0) != length)
      refuse(name, "of length " + std::to_string(t.size(0)), std::to_string(length) + " entries are needed");
    return static_cast<T*>(t.data);
  }
};

int64_t length_of(const py::object& object, const char* name) {
  const Tensor t = read_tensor(object, name);
  if (t.shape.size() != 1) refuse(name, "of shape " + show(t.shape), "pass one dimension");
  return t.size(0);
}

Tensor matrix(const Place& place, const py::object& object, const char* name, Dtype& dtype) {
  const Tensor t = place.tensor(object, name, 2);
  if (t.dtype == "float32") dtype = Dtype::f32;
  else if (t.dtype == "bfloat16") dtype = Dtype::bf16;
  else if (t.dtype == "float16") dtype = Dtype::f16;
  else refuse(name, "of dtype " + t.dtype, "pass float32, bfloat16 or float16");
  if ((t.size(1) > 1 && t.strides[1] != 1) || (t.size(0) > 1 && t.strides[0] < t.size(1)))
    refuse(name, "of strides " + show(t.strides), "columns must be adjacent and rows apart");
  return t;
}

void check(int64_t num_valid, const Tensor& x, double c) {
  if (num_valid < 0 || num_valid > x.size(1))
    refuse("num_valid", std::to_string(num_valid), "there are " + std::to_string(x.size(1)) + " columns");
  if (!(c > 0) || !std::isfinite(c)) refuse("inv_temperature", std::to_string(c), "pass a positive number");
}

void check_digit(int level, int shift, int bits) {
  const int width = level == 0 ? 32 : 64;
  if (level < 0 || level > 2 || shift < 0 || bits < 1 || bits > 11 || shift + bits > width)
    refuse("digit", show({level, shift, bits}), "level 0 to 2, at most 11 bits inside the level's width");
}

// Launches with the arguments of a braced tuple: its members are made from left to right, so every tensor is looked at
// before the device is asked for its stream.
template <class Kernel, class Arguments>
void launch(const char* op, Kernel kernel, const Arguments& arguments) {
  const char* error = std::apply(kernel, arguments);
  if (error) throw std::runtime_error(std::string("CUDA error in ") + op + ": " + error);
}

constexpr int64_t STATE_WORDS = 8, COUNTS = 2050, ITEM_BYTES = 24;

}  // namespace

void bind_cuda(py::module_& parent) {
  py::module_ m = parent.def_submodule("cuda");
  m.def("row_stats", [](const py::object& logits, const py::object& local_targets, int64_t num_valid, double c,
                        const py::object& stats) {
    const Place place(logits, "logits");
    Dtype dtype;
    const Tensor x = matrix(place, logits, "logits", dtype);
    check(num_valid, x, c);
    const int64_t rows = x.size(0);
    launch("row_stats", cuda::row_stats,
           std::tuple{x.data, dtype, place.vector<int64_t>(local_targets, "local_targets", "int64", rows), rows,
                      rows > 1 ? x.strides[0] : x.size(1), num_valid, static_cast<float>(c),
                      place.vector<float>(stats, "stats", "float32", 4 * rows), place.index, place.stream()});
  });
  m.def("row_backward", [](const py::object& logits, const py::object& out, const py::object& local_targets,
                           int64_t num_valid, double c, const py::object& m, const py::object& log_z,
                           const py::object& entropy, const py::object& grad_lp, const py::object& grad_h) {
    const Place place(logits, "logits");
    Dtype dtype, dtype_out;
    const Tensor x = matrix(place, logits, "logits", dtype), to = matrix(place, out, "out", dtype_out);
    if (to.shape != x.shape || dtype_out != dtype)
      refuse("out", "of shape " + show(to.shape), "it must be the logits'");
    check(num_valid, x, c);
    const int64_t rows = x.size(0);
    auto row = [&](const py::object& t, const char* name) { return place.vector<float>(t, name, "float32", rows); };
    const cuda::Grads grads = {row(m, "m"), row(log_z, "log_z"), row(entropy, "entropy"), row(grad_lp, "grad_log_prob"),
                               grad_h.is_none() ? nullptr : row(grad_h, "grad_entropy")};
    launch("row_backward", cuda::row_backward,
           std::tuple{x.data, to.data, dtype, place.vector<int64_t>(local_targets, "local_targets", "int64", rows),
                      rows, rows > 1 ? x.strides[0] : x.size(1), rows > 1 ? to.strides[0] : to.size(1), x.size(1),
                      num_valid, static_cast<float>(c), grads, place.index, place.stream()});
  });
  m.def("max_variance", [](const py::object& values, const py::object& tie_key, const py::object& order,
                           const py::object& borders, const py::object& items_at, int64_t m, const py::object& items,
                           const py::object& sums, const py::object& mask, const py::object& status) {
    const Place place(values, "values");
    const int64_t n = length_of(values, "values"), segments = length_of(borders, "borders") - 1;
    if (m < 0) refuse("m", std::to_string(m), "pass the number of values to keep");
    if (segments < 0) refuse("borders", "empty", "pass segments + 1 borders");
    launch("max_variance", cuda::max_variance,
           std::tuple{place.vector<double>(values, "values", "float64", n),
                      place.vector<int64_t>(tie_key, "tie_key", "int64", n),
                      place.vector<int64_t>(order, "order", "int64", n),
                      place.vector<int64_t>(borders, "borders", "int64", segments + 1),
                      place.vector<int64_t>(items_at, "items_at", "int64", segments + 1), segments, m,
                      place.vector<uint8_t>(items, "items", "uint8", 2 * n * ITEM_BYTES, true),
                      place.vector<double>(sums, "sums", "float64", 4 * (n + segments), true),
                      place.vector<uint8_t>(mask, "mask", "bool", n), place.vector<int>(status, "status", "int32", 1),
                      place.index, place.stream()});
  });
  m.def("share_histogram", [](const py::object& scores, const py::object& uid, const py::object& position, int level,
                              int shift, int bits, const py::object& state, const py::object& counts) {
    const Place place(scores, "scores");
    const int64_t n = length_of(scores, "scores");
    check_digit(level, shift, bits);
    launch(
        "share_histogram", cuda::share_histogram,
        std::tuple{place.vector<float>(scores, "scores", "float32", n), place.vector<int64_t>(uid, "uid", "int64", n),
                   place.vector<int64_t>(position, "position", "int64", n), n, level, shift, bits,
                   place.vector<int64_t>(state, "state", "int64", STATE_WORDS),
                   place.vector<int64_t>(counts, "counts", "int64", COUNTS), place.index, place.stream()});
  });
  m.def("share_pick", [](int level, int shift, int bits, const py::object& state, const py::object& counts) {
    const Place place(state, "state");
    check_digit(level, shift, bits);
    launch("share_pick", cuda::share_pick,
           std::tuple{level, shift, bits, place.vector<int64_t>(state, "state", "int64", STATE_WORDS),
                      place.vector<int64_t>(counts, "counts", "int64", COUNTS), place.index, place.stream()});
  });
  m.def("share_mask", [](const py::object& scores, const py::object& uid, const py::object& position,
                         const py::object& state, const py::object& mask) {
    const Place place(scores, "scores");
    const int64_t n = length_of(scores, "scores");
    launch(
        "share_mask", cuda::share_mask,
        std::tuple{place.vector<float>(scores, "scores", "float32", n), place.vector<int64_t>(uid, "uid", "int64", n),
                   place.vector<int64_t>(position, "position", "int64", n), n,
                   place.vector<int64_t>(state, "state", "int64", STATE_WORDS),
                   place.vector<uint8_t>(mask, "mask", "bool", n), place.index, place.stream()});
  });
}
