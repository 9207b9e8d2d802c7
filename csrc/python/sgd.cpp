// mixprec._C.sgd_step, and what it keeps between steps: state, and hyperparameters for CUDA graphs.
#include <unordered_map>

#include "module.h"
#include "tensors.h"

namespace mixprec {
namespace {

bool flag_of(const py::dict& group, const char* name) { return py::bool_(py::object(group[name])); }

SgdHyperparameters hyperparameters_of(const py::list& param_groups, size_t index) {
  const auto group = py::cast<py::dict>(param_groups[index]);
  const auto number = [&](const char* name) {
    const py::object object = group[name];
    const double value = PyFloat_AsDouble(object.ptr());
    if (PyErr_Occurred()) {
      const auto message = c10::str(name, " of group ", index, " is no number, but a ",
                                    Py_TYPE(object.ptr())->tp_name);
      py::raise_from(PyExc_TypeError, message.c_str());
      throw py::error_already_set();
    }
    TORCH_CHECK_VALUE(std::isfinite(value), name, " of group ", index, " is ", value,
                      "; it must be finite");
    return value;
  };
  return {number("lr"), number("momentum"), number("dampening"), number("weight_decay"),
          flag_of(group, "nesterov")};
}

// Hyperparameters of an optimizer in device memory, for steps in a CUDA graph: replays read what
// was stored last. Also keeps the host's values, so that a step need not read a tensor lr back.
class DeviceHyperparameters {
 public:
  explicit DeviceHyperparameters(const py::list& param_groups) {
    for (const auto& group : param_groups) {
      auto& by_device = constants_.emplace_back();
      for (const auto& object : py::cast<py::list>(py::cast<py::dict>(group)["params"])) {
        const at::Device device = py::cast<Tensor>(object).device();
        if (!device.is_cuda() || of_device(by_device, device).defined()) continue;
        const auto bytes = at::TensorOptions().device(device).dtype(at::kByte);
        of_device(by_device, device) = at::empty({sizeof(SgdConstants<float>)}, bytes);
      }
    }
    host_.resize(constants_.size());
    store(param_groups);
  }

  // Stores those of the groups that changed.
  void store(const py::list& param_groups) {
    TORCH_CHECK(param_groups.size() == host_.size(), "a parameter group was added or removed");
    for (size_t group = 0; group < host_.size(); ++group) {
      const auto now = hyperparameters_of(param_groups, group);
      if (host_[group] && *host_[group] == now) continue;
      host_[group] = now;
      for (const auto& [device, constants] : constants_[group]) {
        const c10::DeviceGuard guard(device);
#ifdef WITH_CUDA
        cuda::store_constants(now, address_of<SgdConstants<float>>(constants));
#endif
      }
    }
  }

  const SgdHyperparameters& host(size_t group) const { return *host_.at(group); }
  const SgdConstants<float>* on(const at::Device& device, size_t group) {
    return device.is_cuda() ? address_of<SgdConstants<float>>(of_device(constants_[group], device))
                            : nullptr;
  }

 private:
  std::vector<std::vector<std::pair<at::Device, Tensor>>> constants_;
  std::vector<optional<SgdHyperparameters>> host_;
};

// Momentum that is_unwritten().
Tensor unwritten_like(const Tensor& param) {
  const bool is_double = param.scalar_type() == at::kDouble;
  return empty_like(param, is_double ? at::kLong : at::kInt)
      .fill_(-1)
      .view(is_double ? at::kDouble : at::kFloat);
}

// A tensor of a parameter's state; undefined where there is none. torch's SGD leaves None where it
// has no momentum.
Tensor find_state(const py::dict& state, const py::str& name, const Tensor& param,
                  const Place& place) {
  const char* what = PyUnicode_AsUTF8(name.ptr());
  PyObject* found = PyDict_GetItemWithError(state.ptr(), name.ptr());
  if (found == nullptr || found == Py_None) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(found), what, " of ", place, " is a ", Py_TYPE(found)->tp_name,
                   ", not a tensor");
  const Tensor& tensor = local(THPVariable_Unpack(found));
  TORCH_CHECK(tensor.sizes() == param.sizes(), what, " of ", place, " has shape ", tensor.sizes(),
              ", its parameter ", param.sizes(), "; was the state of another model loaded?");
  check_memory(tensor, what, place);
  return tensor;
}

// A tensor of a parameter's state that a step made. It enters the optimizer's state when all are
// there: a step that fails, out of memory say, leaves the state as it was.
struct NewState {
  PyObject* param;
  py::dict state;
  const py::str& name;
  py::object tensor;
};

// State of a DTensor is a DTensor, as torch.optim.SGD's is: checkpoints are sharded by it.
py::object placed_like(PyObject* param, const Tensor& tensor) {
  const auto object = py::reinterpret_borrow<py::object>(param);
  if (local(THPVariable_Unpack(param)).is_same(THPVariable_Unpack(param))) return py::cast(tensor);
  return object.attr("from_local")(
      tensor, object.attr("device_mesh"), object.attr("placements"), py::arg("run_check") = false,
      py::arg("shape") = object.attr("shape"), py::arg("stride") = object.attr("stride")());
}

// The same, made by `create` where there is none, and brought to the parameter's device, order in
// memory and this dtype where a checkpoint or a user left another.
template <typename Create>
Tensor state_tensor(std::vector<NewState>& made, PyObject* object, const py::dict& state,
                    const py::str& name, const Tensor& param, at::ScalarType dtype,
                    const Place& place, Create create) {
  Tensor tensor = find_state(state, name, param, place);
  const bool is_new = !tensor.defined();
  if (is_new) tensor = create();
  if (tensor.scalar_type() != dtype || tensor.device() != param.device() ||
      !same_layout(tensor, param)) {
    tensor = empty_like(param, dtype).copy_(tensor);
  } else if (!is_new) {
    return tensor;
  }
  made.push_back({object, state, name, placed_like(object, tensor)});
  return tensor;
}

void check_param(const Tensor& param, const Tensor& grad, const Place& place) {
  check_readable(param, "weight", place);
  check_readable(grad, "gradient", place);
  TORCH_CHECK(param.is_non_overlapping_and_dense(), place, " has shape ", param.sizes(),
              " and strides ", param.strides(),
              ", which leave gaps or overlap; make it contiguous() before you optimize it");
  TORCH_CHECK(grad.device() == param.device(), place, " is on ", param.device(),
              ", its gradient on ", grad.device(), "; move the gradient to the parameter");
  TORCH_CHECK(grad.sizes() == param.sizes(), place, " has shape ", param.sizes(), ", its gradient ",
              grad.sizes(), "; was one of them replaced after the backward pass?");
  TORCH_CHECK(grad.scalar_type() == param.scalar_type() ||
                  (grad.scalar_type() == at::kFloat && param.scalar_type() != at::kDouble),
              place, " is ", param.scalar_type(), ", its gradient ", grad.scalar_type(),
              "; a gradient has its parameter's dtype or float32");
}

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// What is kept beside a half weight: its master, or the master's remainder, made from the other.
Tensor converted(const Tensor& any_weight, const Tensor& kept, at::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  check_device(any_weight.device());
  TORCH_CHECK_TYPE(is_half(any_weight), "only float16 and bfloat16 weights have a remainder, not ",
                   any_weight.scalar_type());
  TORCH_CHECK_VALUE(kept.sizes() == any_weight.sizes(), "the weight has shape ", any_weight.sizes(),
                    ", what is kept beside it ", kept.sizes());
  const bool split = dtype == at::kShort;
  const Tensor weight =
      any_weight.is_non_overlapping_and_dense() ? any_weight : any_weight.contiguous();
  const Tensor from = empty_like(weight, split ? at::kFloat : at::kShort).copy_(kept);
  const Tensor to = empty_like(weight, dtype);
  const RemainderData data{data_of(weight), address_of<float>(split ? from : to),
                           address_of<int16_t>(split ? to : from)};
  if (split) {
    DISPATCH(weight.device(), to_remainder(data));
  } else {
    DISPATCH(weight.device(), to_master(data));
  }
  return to;
}

// An optimizer's state by parameter, a new dict where there is none. Looking up one parameter would
// run Tensor.__hash__, which is Python code, so the whole dict is walked once.
class States {
 public:
  explicit States(const py::dict& state) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(state.ptr(), &position, &key, &value)) known_.emplace(key, value);
  }
  py::dict operator[](PyObject* param) const {
    const auto found = known_.find(param);
    if (found == known_.end()) return {};
    return py::reinterpret_borrow<py::dict>(found->second);
  }

 private:
  std::unordered_map<PyObject*, PyObject*> known_;  // the optimizer holds both
};

struct SgdTensors {  // of one parameter, all with the parameter's order in memory
  Tensor param, grad, momentum_buffer, master;  // without momentum or master: undefined
};

// One step of every group. initial_master(param) is the first fp32 value of a half parameter, which
// forget_exact(param) says is in use. Everything is made before the first weight is written.
// State of the other kind than store_param_remainders asks for is converted now, not when it is
// loaded: now the weight is known, whichever of model and optimizer was loaded first.
void sgd_step(const py::list& param_groups, const py::dict& state, const py::object& initial_master,
              const py::object& forget_exact, bool store_param_remainders,
              const optional<Tensor>& grad_scale, const optional<Tensor>& found_inf,
              const optional<Tensor>& norm, double max_norm, DeviceHyperparameters* on_device) {
  const c10::NoGradGuard no_grad;
  std::vector<SgdHyperparameters> hyperparameters;
  for (size_t group = 0; group < param_groups.size(); ++group) {
    hyperparameters.push_back(on_device ? on_device->host(group)
                                        : hyperparameters_of(param_groups, group));
  }

  struct Found {
    PyObject* object;  // of param, which its group holds
    const Tensor& param;
    const Tensor& grad;
    Place place;
  };
  const States states(state);
  std::vector<Found> all;
  for_each_grad(param_groups,
                [&](PyObject* object, const Tensor& param, const Tensor& grad, const Place& place) {
                  check_param(param, grad, place);
                  all.push_back({object, param, grad, place});
                });

  // Never freed: at exit Python is gone before static objects are.
  static const py::str &momentum_buffer = *new py::str("momentum_buffer"),
                       &master = *new py::str("master"),
                       &remainder = *new py::str("master_remainder");
  const py::str &kept = store_param_remainders ? remainder : master,
                &other = store_param_remainders ? master : remainder;
  const auto kept_dtype = store_param_remainders ? at::kShort : at::kFloat;
  std::vector<std::vector<std::pair<at::Device, std::vector<SgdTensors>>>> groups(
      hyperparameters.size());
  std::vector<NewState> made;
  for (const auto& [object, param, grad, place] : all) {
    SgdTensors tensors{param, laid_out_like(grad, param), {}, {}};
    const bool has_master = is_half(param);
    const bool has_momentum = hyperparameters[place.group].momentum != 0;
    if (has_master || has_momentum) {
      const py::dict param_state = states[object];
      if (has_momentum) {
        const auto dtype = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        const auto create = [&param = param] { return unwritten_like(param); };
        tensors.momentum_buffer =
            state_tensor(made, object, param_state, momentum_buffer, param, dtype, place, create);
      }
      if (has_master) {
        const auto create = [&, object = object, &param = param, &place = place] {
          Tensor found = find_state(param_state, other, param, place);
          if (found.defined()) {
            // -2^15 is a tie, which bfloat16's plain rounding takes to another weight.
            if (!store_param_remainders) found = found.clamp_min(-0x7FFF);
          } else {
            found = local(py::cast<Tensor>(initial_master(py::handle(object))));
            if (!store_param_remainders) return found;
          }
          return converted(param, found, kept_dtype);
        };
        tensors.master =
            state_tensor(made, object, param_state, kept, param, kept_dtype, place, create);
      }
    }
    of_device(groups[place.group], param.device()).push_back(std::move(tensors));
  }

  struct Launch {
    at::Device device;
    size_t group;
    const std::vector<SgdTensors>& tensors;
    Tensor grad_scale, found_inf, norm;
  };
  std::vector<Launch> launches;
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const auto& [device, tensors] : groups[group]) {
      launches.push_back({device, group, tensors, scalar_on(grad_scale, device, "grad_scale"),
                          scalar_on(found_inf, device, "found_inf"),
                          scalar_on(norm, device, "norm")});
    }
  }
  for (const NewState& m : made) {
    state[py::handle(m.param)] = m.state;
    m.state[m.name] = m.tensor;
    if (!m.name.is(kept)) continue;
    if (m.state.contains(other)) PyDict_DelItem(m.state.ptr(), other.ptr());
    forget_exact(py::handle(m.param));
  }
  for (const Launch& launch : launches) {
    std::vector<SgdData> params;
    params.reserve(launch.tensors.size());
    for (const SgdTensors& t : launch.tensors) {
      params.push_back({data_of(t.param), data_of(t.grad), address_of<void>(t.momentum_buffer),
                        data_of(t.master)});
    }
    const StepScalars scalars{address_of<float>(launch.grad_scale),
                              address_of<float>(launch.found_inf),
                              address_of<float>(launch.norm),
                              static_cast<float>(max_norm),
                              flag_of(py::cast<py::dict>(param_groups[launch.group]), "maximize"),
                              on_device ? on_device->on(launch.device, launch.group) : nullptr};
    DISPATCH(launch.device, sgd_step(params, hyperparameters[launch.group], scalars));
    for (const SgdTensors& t : launch.tensors) {
      bump_version(t.param);
      bump_version(t.momentum_buffer);
      bump_version(t.master);
    }
  }
}

}  // namespace

void bind_sgd(py::module_& module) {
  using namespace pybind11::literals;
  module.def("sgd_step", &sgd_step, "param_groups"_a, "state"_a, "initial_master"_a,
             "forget_exact"_a, "store_param_remainders"_a, "grad_scale"_a, "found_inf"_a, "norm"_a,
             "max_norm"_a, "device_hyperparameters"_a);
  module.def(
      "to_remainder",
      [](const Tensor& weight, const Tensor& master) {
        return converted(weight, master, at::kShort);
      },
      "weight"_a, "master"_a);
  module.def(
      "to_master",
      [](const Tensor& weight, const Tensor& remainder) {
        return converted(weight, remainder, at::kFloat);
      },
      "weight"_a, "remainder"_a);
  py::class_<DeviceHyperparameters>(module, "DeviceHyperparameters")
      .def(py::init<const py::list&>(), "param_groups"_a)
      .def("store", &DeviceHyperparameters::store, "param_groups"_a);
}

}  // namespace mixprec
