// What mixprec/graphed.py does before and after each replay, in C++ because a replay takes as long
// as a Python loop over a hundred parameters: is everything still where the graph was captured?
// Inputs go in, outputs come out.
#include <ATen/autocast_mode.h>
#include <c10/util/hash.h>
#ifdef WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

#include "module.h"
#include "tensors.h"

namespace mixprec {

namespace {

class Fingerprint {
 public:
  static constexpr int kMaxDepth = 6;  // of nested containers, which may hold themselves

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
        // Names may be made anew at every call, as those of DistributedDataParallel's buffers are.
        address(PyUnicode_CheckExact(key) ? static_cast<size_t>(PyObject_Hash(key))
                                          : reinterpret_cast<size_t>(key));
        add(value, depth + 1);
      }
    } else if (depth < kMaxDepth && (PyList_Check(object) || PyTuple_Check(object))) {
      address(static_cast<size_t>(PySequence_Fast_GET_SIZE(object)));
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        add(PySequence_Fast_GET_ITEM(object, i), depth + 1);
      }
    } else if (depth < kMaxDepth && is_tensor(Py_TYPE(object))) {
      add(THPVariable_Unpack(object));
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
  static bool is_tensor(PyTypeObject* type) {
    // THPVariable_Check asks the metaclass of all that are none.
    return THPVariable_CheckTypeExact(type) ||
           PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass));
  }

  void address(size_t x) { addresses = c10::hash_combine(addresses, x); }
  void mode(size_t x) { modes = c10::hash_combine(modes, x); }

  void add(const Tensor& tensor) {
    mode(tensor.requires_grad());
    size_t own = reinterpret_cast<size_t>(tensor.unsafeGetTensorImpl());
    // What tensor.const_data_ptr() computes, without its checks.
    const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (storage != nullptr && tensor.layout() == at::kStrided) {
      own = own * 31 + reinterpret_cast<size_t>(storage->data());
      own = own * 31 + static_cast<size_t>(tensor.storage_offset());
      own = own * 31 + static_cast<size_t>(tensor.scalar_type());
      const auto sizes = tensor.sizes(), strides = tensor.strides();
      for (size_t d = 0; d < sizes.size(); ++d) own = (own * 31 + sizes[d]) * 31 + strides[d];
    }
    address(own);
  }
};

// A name is a str, or (str,) where only whether the value is true counts.
void add_values(Fingerprint& result, PyObject* dict, PyObject* names, int depth = 0) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (PyTuple_Check(name)) {
      PyObject* value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(name, 0));
      result.add(value != nullptr && PyObject_IsTrue(value) == 1 ? Py_True : Py_False);
    } else {
      result.add(PyDict_GetItemWithError(dict, name), depth);
    }
  }
}

// Of (cell,): what the cell holds. Of (dict,): all values. Of (dict, names): the values of these
// names. Of (dict, list's name, names): the values of these names in each dict of the list, which
// of lists in there (an optimizer's parameters) are the items' identities.
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
        add_values(result, dict.ptr(), PyTuple_GET_ITEM(entry, 2), Fingerprint::kMaxDepth - 1);
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

#ifdef WITH_CUDA

// What brings a call's inputs to where a graph reads them, and its results to the caller: memory
// that is new at each replay, so the graph's last node reads from a table where it lies. All copies
// of a replay are one launch, which takes the host half as long as one cudaMemcpyAsync.
class Copies {
 public:
  // Before the capture, whose memory the table must not share. What is no tensor is not copied.
  explicit Copies(const py::list& inputs)
      : table_(at::empty(
            {kTableSize},
            at::TensorOptions().device(at::kCUDA, c10::cuda::current_device()).dtype(at::kLong))) {
    for (const auto& item : inputs) {
      inputs_.push_back(THPVariable_Check(item.ptr()) ? THPVariable_Unpack(item.ptr()) : Tensor());
    }
  }

  // In the capture, at its end. The caller keeps the outputs: this class would hide from Python's
  // garbage collector what else is among them.
  void capture(const py::list& outputs) {
    std::vector<CopyData> copies;
    for (const auto& item : outputs) {
      in_table_.push_back(copies.size() < kTableSize && THPVariable_CheckExact(item.ptr()) &&
                          is_memory(THPVariable_Unpack(item.ptr())));
      if (!in_table_.back()) continue;
      const Tensor& output = THPVariable_Unpack(item.ptr());
      copies.push_back({cells() + copies.size(), output.const_data_ptr(),
                        static_cast<int64_t>(output.nbytes()), CopyKind::kThrough});
    }
    cuda::copy(copies);
  }

  // Before a replay with these inputs. Returns its results, as far as the graph writes them.
  py::list before(const py::list& inputs, const py::list& outputs) const {
    std::vector<CopyData> copies;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor& to = inputs_[i];
      if (!to.defined()) continue;
      const Tensor& from = THPVariable_Unpack(PyList_GET_ITEM(inputs.ptr(), i));
      if (is_memory(from) && from.key_set() == to.key_set() &&
          from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
          from.strides() == to.strides()) {
        copies.push_back(
            {to.data_ptr(), from.const_data_ptr(), static_cast<int64_t>(from.nbytes())});
      } else {
        const py::gil_scoped_release no_gil;  // from memory that is not pinned it waits
        to.copy_(from, /*non_blocking=*/true);
      }
    }
    py::list results(outputs.size());
    int64_t* cell = cells();
    for (size_t i = 0; i < in_table_.size(); ++i) {
      py::object result = outputs[i];
      if (in_table_[i]) {
        const Tensor& output = THPVariable_Unpack(result.ptr());
        const Tensor made = empty_like(output, output.scalar_type());
        copies.push_back({cell++, made.data_ptr(), sizeof(void*), CopyKind::kAddress});
        result = py::cast(made);
      }
      PyList_SET_ITEM(results.ptr(), i, result.release().ptr());
    }
    const c10::DeviceGuard guard(table_.device());
    const py::gil_scoped_release no_gil;
    cuda::copy(copies);
    return results;
  }

  // After it: the other results.
  void after(py::list& results) const {
    for (size_t i = 0; i < in_table_.size(); ++i) {
      if (in_table_[i] || !THPVariable_Check(results[i].ptr())) continue;
      results[i] = results[i].attr("clone")();
    }
  }

 private:
  static constexpr size_t kTableSize = 64;  // 512 bytes, the least that torch allocates

  // Whether its bytes are all there is to copy: no gaps, no lazy conjugation, no inference mode.
  bool is_memory(const Tensor& tensor) const {
    return tensor.device() == table_.device() && tensor.is_non_overlapping_and_dense() &&
           !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference();
  }

  int64_t* cells() const { return table_.mutable_data_ptr<int64_t>(); }

  std::vector<Tensor> inputs_;  // undefined for what is no tensor
  std::vector<bool> in_table_;  // of each output
  Tensor table_;                // addresses of results
};

#endif

}  // namespace

void bind_guards(py::module_& module) {
  using namespace pybind11::literals;
  module.def("fingerprint", &fingerprint, "watched"_a);
  module.def("signature", &signature, "tensor"_a);
#ifdef WITH_CUDA
  py::class_<Copies>(module, "Copies")
      .def(py::init<const py::list&>(), "inputs"_a)
      .def("capture", &Copies::capture, "outputs"_a)
      .def("before", &Copies::before, "inputs"_a, "outputs"_a)
      .def("after", &Copies::after, "results"_a);
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
