// What the Python-facing files share: gradients and state read out of an optimizer's Python
// objects, checked, and handed to the backend of their device. Everything is checked before the
// first tensor is written. Only the files of this folder know Python and whether CUDA was built.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "../ops.h"

namespace mixprec {

namespace py = pybind11;
using at::Tensor;
using std::optional;

inline void check_device(const at::Device& device) {
#ifdef WITH_CUDA
  const bool known = device.is_cpu() || device.is_cuda();
#else
  TORCH_CHECK(!device.is_cuda(),
              "mixprec was built without CUDA; reinstall it where nvcc is on the PATH "
              "and torch has CUDA");
  const bool known = device.is_cpu();
#endif
  TORCH_CHECK(known, "mixprec works on CPU and CUDA tensors, got one on ", device);
}

#ifdef WITH_CUDA
#define BACKEND(DEVICE, CALL) (DEVICE).is_cuda() ? cuda::CALL : cpu::CALL
#else
#define BACKEND(DEVICE, CALL) cpu::CALL
#endif

// Calls an op in the backend of the device, beside other Python threads.
#define DISPATCH(DEVICE, CALL)            \
  do {                                    \
    const c10::DeviceGuard guard(DEVICE); \
    const py::gil_scoped_release no_gil;  \
    BACKEND(DEVICE, CALL);                \
  } while (false)

inline Data data_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.numel(), tensor.scalar_type()};
}

template <typename T>
T* address_of(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

// Whether its elements lie inside its storage, which others may shrink or free under a tensor.
inline bool has_memory(const Tensor& tensor) {
  const int64_t numel = tensor.numel(), offset = tensor.storage_offset();
  const size_t item = tensor.element_size();
  const size_t end =
      tensor.is_non_overlapping_and_dense()
          ? (offset + numel) * item
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item, offset);
  return numel == 0 || end <= tensor.storage().nbytes();
}

// A scalar argument as the kernels read it. Moving it to another GPU is asynchronous.
inline Tensor scalar_on(const optional<Tensor>& scalar, const at::Device& device,
                        const char* name) {
  if (!scalar) return {};
  TORCH_CHECK(scalar->scalar_type() == at::kFloat && scalar->numel() == 1 && has_memory(*scalar),
              name, " must be one float32, got ", scalar->numel(), " x ", scalar->scalar_type(),
              has_memory(*scalar) ? "" : " whose memory was freed");
  return scalar->to(device, /*non_blocking=*/true);
}

// Autograd reports a backward pass through a value that has been overwritten, if it is told.
inline void bump_version(const Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// The same order in memory. The stride of a dimension of one element means nothing.
inline bool same_layout(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

inline Tensor empty_like(const Tensor& like, at::ScalarType dtype) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype));
}

inline Tensor laid_out_like(const Tensor& tensor, const Tensor& like) {
  if (same_layout(tensor, like)) return tensor;
  return empty_like(like, tensor.scalar_type()).copy_(tensor);
}

// "parameter 3 of group 0": what error messages call a tensor.
struct Place {
  size_t group, index;
};
inline std::ostream& operator<<(std::ostream& out, const Place& place) {
  return out << "parameter " << place.index << " of group " << place.group;
}

inline void check_dtype(const Tensor& tensor, const char* what, const Place& place) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                  (dtype == at::kDouble && tensor.is_cpu()),
              "mixprec takes float32, float16 and bfloat16 (on the CPU float64 too), but the ",
              what, " of ", place, " is ", dtype, " on ", tensor.device(),
              "; use torch's optimizer and scaler for it");
}

inline void check_memory(const Tensor& tensor, const char* what, const Place& place) {
  TORCH_CHECK(has_memory(tensor), "the ", what, " of ", place, " has ", tensor.numel(),
              " elements, but its storage was freed or shrunk (by offloading, say); restore it "
              "before the step");
}

inline void check_readable(const Tensor& tensor, const char* what, const Place& place) {
  check_device(tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, "the ", what, " of ", place, " is ", tensor.layout(),
              ", mixprec takes dense tensors; use torch's optimizer for it");
  TORCH_CHECK(!tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage(), "the ", what,
              " of ", place,
              " is a tensor subclass without memory of its own, which mixprec can't read");
  check_memory(tensor, what, place);
  check_dtype(tensor, what, place);
}

// What this process has of a DTensor, which its Python object holds; other tensors as they are.
inline const Tensor& local(const Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
  const py::object shard = py::getattr(py::cast(tensor), "_local_tensor", py::none());
  return THPVariable_Check(shard.ptr()) ? THPVariable_Unpack(shard.ptr()) : tensor;
}

// A gradient that is still to be added up over a mesh (Partial), say, must not be stepped with.
inline void check_placements(const Tensor& param, const Tensor& grad, const Place& place) {
  if (!(param.key_set() | grad.key_set()).has(c10::DispatchKey::Python)) return;
  const auto placements = [](const Tensor& tensor) -> py::object {
    return py::getattr(py::cast(tensor), "placements", py::none());
  };
  const auto of_param = placements(param), of_grad = placements(grad);
  TORCH_CHECK_VALUE(of_param.equal(of_grad), place, " has the placements ",
                    std::string(py::str(of_param)), ", its gradient ",
                    std::string(py::str(of_grad)),
                    "; redistribute() the gradient as its parameter is before the step");
}

// Calls f(parameter's Python object, parameter, place) for each.
template <typename F>
void for_each_param(const py::list& param_groups, F f) {
  for (size_t group = 0; group < param_groups.size(); ++group) {
    const auto params = py::cast<py::list>(py::cast<py::dict>(param_groups[group])["params"]);
    for (size_t i = 0; i < params.size(); ++i) {
      PyObject* object = PyList_GET_ITEM(params.ptr(), i);
      const Place place{group, i};
      TORCH_CHECK_TYPE(THPVariable_Check(object), place, " is a ", Py_TYPE(object)->tp_name,
                       ", not a tensor");
      const Tensor& param = THPVariable_Unpack(object);
      f(object, param, place);
    }
  }
}

// Calls f(parameter's Python object, parameter, gradient, place) for each that has a gradient; of a
// DTensor, parameter and gradient are what this process has of it.
template <typename F>
void for_each_grad(const py::list& param_groups, F f) {
  for_each_param(param_groups, [&](PyObject* object, const Tensor& param, const Place& place) {
    const Tensor& grad = param.grad();
    if (!grad.defined()) return;
    check_placements(param, grad, place);
    f(object, local(param), local(grad), place);
  });
}

// Groups what belongs to one device, in the order of first appearance.
template <typename T>
T& of_device(std::vector<std::pair<at::Device, T>>& by_device, const at::Device& device) {
  for (auto& [known, value] : by_device) {
    if (known == device) return value;
  }
  return by_device.emplace_back(device, T{}).second;
}

}  // namespace mixprec
