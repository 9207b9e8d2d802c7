// What mixprec/graphed.py does before and after each replay, in C++ because a replay takes as long
// as a Python loop over a hundred parameters: is everything still where the graph was captured?
// Inputs go in, outputs come out.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "../ops.h"
#include "module.h"

namespace mixprec {

namespace py = pybind11;

namespace {

using at::Tensor;

class Fingerprint {
 public:
  // Memory and identity go into `addresses`: a graph captured with others is stale for good. Values
  // go into `modes`: a graph for other ones may be wanted again (train and eval).
  size_t addresses = 0, modes = 0;

  void add(PyObject* object, int depth = 0) {
    if (object == nullptr || object == Py_None) return mode(0);
    if (PyBool_Check(object)) return mode(reinterpret_cast<size_t>(object));
    if (PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object)) {
      // 1, 1.0 and True have one hash, and so have -1 and -2.
      mode(reinterpret_cast<size_t>(Py_TYPE(object)));
      if (!PyUnicode_CheckExact(object)) mode(std::hash<double>{}(PyFloat_AsDouble(object)));
      PyErr_Clear();  // an int beyond double's range: the hash has to do
      return mode(static_cast<size_t>(PyObject_Hash(object)));
    }
    if (depth < kMaxDepth && PyDict_Check(object)) {
      PyObject *key, *value;
      Py_ssize_t position = 0;
      address(static_cast<size_t>(PyDict_Size(object)));
      while (PyDict_Next(object, &position, &key, &value)) {
        address(reinterpret_cast<size_t>(key));
        add(value, depth + 1);
      }
    } else if (depth < kMaxDepth && (PyList_Check(object) || PyTuple_Check(object))) {
      address(static_cast<size_t>(PySequence_Fast_GET_SIZE(object)));
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        add(PySequence_Fast_GET_ITEM(object, i), depth + 1);
      }
    } else if (PyType_IsSubtype(Py_TYPE(object),
                                reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      add(THPVariable_Unpack(object));  // THPVariable_Check asks the metaclass of all others
    } else {
      address(reinterpret_cast<size_t>(object));
    }
  }

  void add_torch_modes() {
    mode(at::GradMode::is_enabled());
    mode(at::autocast::is_autocast_enabled(at::kCUDA));
    mode(static_cast<size_t>(at::autocast::get_autocast_dtype(at::kCUDA)));
  }

 private:
  static constexpr int kMaxDepth = 6;  // of nested containers, which may hold themselves

  void address(size_t x) { addresses = c10::hash_combine(addresses, x); }
  void mode(size_t x) { modes = c10::hash_combine(modes, x); }

  void add(const Tensor& tensor) {
    mode(tensor.requires_grad());
    size_t own = reinterpret_cast<size_t>(tensor.unsafeGetTensorImpl());
    if (tensor.layout() == at::kStrided && tensor.has_storage()) {
      own = own * 31 + reinterpret_cast<size_t>(tensor.const_data_ptr());
      own = own * 31 + static_cast<size_t>(tensor.scalar_type());
      for (const int64_t size : tensor.sizes()) own = own * 31 + size;
      for (const int64_t stride : tensor.strides()) own = own * 31 + stride;
    }
    address(own);
  }
};

// A name is a str, or (str,) where only whether the value is true counts.
void add_values(Fingerprint& result, PyObject* dict, PyObject* names) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (PyTuple_Check(name)) {
      PyObject* value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(name, 0));
      result.add(value != nullptr && PyObject_IsTrue(value) == 1 ? Py_True : Py_False);
    } else {
      result.add(PyDict_GetItemWithError(dict, name));
    }
  }
}

// Of (cell,): what the cell holds. Of (dict,): all values. Of (dict, names): the values of these
// names. Of (dict, list's name, names): the values of these names in each dict of the list.
std::pair<size_t, size_t> fingerprint(const py::list& watched) {
  Fingerprint result;
  result.add_torch_modes();
  for (const auto& item : watched) {
    PyObject* entry = item.ptr();
    PyObject* container = PyTuple_GET_ITEM(entry, 0);
    const auto size = PyTuple_GET_SIZE(entry);
    if (size == 1) {
      result.add(PyCell_Check(container) ? PyCell_GET(container) : container);
    } else if (size == 2) {
      add_values(result, container, PyTuple_GET_ITEM(entry, 1));
    } else {
      const auto dicts = PyDict_GetItemWithError(container, PyTuple_GET_ITEM(entry, 1));
      for (const auto& dict : py::reinterpret_borrow<py::list>(dicts)) {
        add_values(result, dict.ptr(), PyTuple_GET_ITEM(entry, 2));
      }
    }
  }
  return {result.addresses, result.modes};
}

// What a graph for one tensor takes of another: its kind, not its place and its values.
py::bytes signature(const Tensor& tensor) {
  c10::SmallVector<int64_t, 16> kind{static_cast<int64_t>(tensor.layout())};
  if (tensor.layout() == at::kStrided) {
    kind.push_back(static_cast<int64_t>(tensor.scalar_type()));
    kind.push_back(tensor.requires_grad());
    kind.append(tensor.sizes().begin(), tensor.sizes().end());
    kind.append(tensor.strides().begin(), tensor.strides().end());
  }
  return {reinterpret_cast<const char*>(kind.data()), kind.size() * sizeof(int64_t)};
}

// What one graph asks of its parameters' gradients before a replay, and leaves in them after it.
class Gradients {
 public:
  // Before the capture, which holds the gradients there are only weakly: what the function throws
  // away is freed then, as in a plain call.
  explicit Gradients(std::vector<Tensor> params) : params_(std::move(params)) {
    for (const Tensor& param : params_) {
      const Tensor& grad = param.grad();
      was_there_.push_back(grad.defined());
      held_.emplace_back(grad.getIntrusivePtr());
    }
  }

  void captured(std::vector<Tensor> written) {
    written_ = std::move(written);
    for (size_t i = 0; i < params_.size(); ++i) {
      after_.push_back(params_[i].grad());
      const Tensor before(held_[i].lock());
      const bool is_kept = before.defined() && before.is_same(after_[i]);
      before_.push_back(was_there_[i] && !is_kept ? std::nullopt : std::optional(before));
    }
    held_.clear();
  }

  // A capture that failed computed nothing: its gradients go, those that it kept are as before.
  void undo() {
    for (size_t i = 0; i < params_.size(); ++i) {
      params_[i].mutable_grad() = Tensor(held_[i].lock());
    }
  }

  bool match() const {
    for (size_t i = 0; i < params_.size(); ++i) {
      if (before_[i] && !params_[i].grad().is_same(*before_[i])) return false;
    }
    return true;
  }

  // Gradients as the captured call left them, and the versions of what a replay has written.
  void restore() {
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!params_[i].grad().is_same(after_[i])) params_[i].mutable_grad() = after_[i];
    }
    for (const Tensor& tensor : written_) tensor.unsafeGetTensorImpl()->bump_version();
  }

 private:
  std::vector<Tensor> params_, after_, written_;
  std::vector<bool> was_there_;
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>> held_;
  // A gradient that the function threw away (zero_grad) may be any now: none here. One that was not
  // there (undefined), or that it added to, must be the same again.
  std::vector<std::optional<Tensor>> before_;
};

// destination.copy_(source), for tensors without autograd. Copying from the same device and layout
// is one call of CUDA's; what torch does before that call would take twice its time.
void copy_tensor(const Tensor& destination, const Tensor& source) {
#ifdef WITH_CUDA
  // Equal keys: no subclass, no lazy conjugation, neither or both of inference mode.
  if (source.is_cuda() && source.key_set() == destination.key_set() &&
      source.device() == destination.device() &&
      source.scalar_type() == destination.scalar_type() && source.sizes() == destination.sizes() &&
      source.strides() == destination.strides() && source.is_non_overlapping_and_dense()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(destination.data_ptr(), source.const_data_ptr(), source.nbytes(),
                                   cudaMemcpyDeviceToDevice,
                                   c10::cuda::getCurrentCUDAStream(source.device().index())));
    return;
  }
#endif
  destination.copy_(source, /*non_blocking=*/true);
}

void copy_all(const std::vector<Tensor>& destinations, const std::vector<Tensor>& sources) {
  for (size_t i = 0; i < destinations.size(); ++i) copy_tensor(destinations[i], sources[i]);
}

// The list with its tensors cloned.
py::list clones(const py::list& items) {
  py::list result;
  for (const auto& item : items) {
    if (!THPVariable_Check(item.ptr())) {
      result.append(item);
      continue;
    }
    if (!THPVariable_CheckExact(item.ptr())) {
      result.append(item.attr("clone")());
      continue;
    }
    const Tensor& tensor = THPVariable_Unpack(item.ptr());
    const Tensor clone = [&] {
      const py::gil_scoped_release no_gil;
      const Tensor out = at::empty_like(tensor);
      copy_tensor(out, tensor);
      return out;
    }();
    result.append(clone);
  }
  return result;
}

}  // namespace

void bind_guards(py::module_& module) {
  using namespace pybind11::literals;
  module.def("fingerprint", &fingerprint, "watched"_a);
  module.def("signature", &signature, "tensor"_a);
  module.def("copy", &copy_all, "destinations"_a, "sources"_a,
             py::call_guard<py::gil_scoped_release>());
  module.def("clones", &clones, "items"_a);
#ifdef WITH_CUDA
  module.def(
      "replace_memsets",
      [](uintptr_t graph) { cuda::replace_memsets(reinterpret_cast<void*>(graph)); }, "graph"_a);
#endif
  py::class_<Gradients>(module, "Gradients")
      .def(py::init<std::vector<Tensor>>(), "params"_a)
      .def("captured", &Gradients::captured, "written"_a)
      .def("undo", &Gradients::undo)
      .def("match", &Gradients::match)
      .def("restore", &Gradients::restore);
}

}  // namespace mixprec
