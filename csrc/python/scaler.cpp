// mixprec._C.check and update_scale: what GradScaler does on the device.
#include <ATen/MemoryOverlap.h>

#include "module.h"
#include "tensors.h"

namespace mixprec {
namespace {

Norm norm_of_type(optional<double> norm_type) {
  if (!norm_type) return Norm::kNone;
  TORCH_CHECK_VALUE(*norm_type == 2.0 || *norm_type == INFINITY,
                    "norm_type must be 2.0 or inf, got ", *norm_type,
                    "; for others call unscale_ and torch.nn.utils.clip_grad_norm_");
  return *norm_type == 2.0 ? Norm::kL2 : Norm::kInf;
}

struct Gradient {
  Tensor tensor;
  Place place;
};

// A device's records of one optimizer: a row for OverflowHeader, then one for each parameter, of
// which groups that were added bring more.
constexpr int64_t kRecordInts = sizeof(OverflowRecord) / sizeof(int64_t);
static_assert(sizeof(OverflowHeader) <= sizeof(OverflowRecord));

Tensor records_on(py::dict records, const at::Device& device, int64_t num_params) {
  const py::object key = py::cast(device);
  const auto options = at::TensorOptions().device(device).dtype(at::kLong);
  const Tensor old =
      records.contains(key) ? py::cast<Tensor>(records[key]) : at::zeros({0, kRecordInts}, options);
  TORCH_CHECK(old.scalar_type() == at::kLong && old.dim() == 2 && old.size(1) == kRecordInts &&
                  old.device() == device && old.is_contiguous() && has_memory(old),
              "records must be n x ", kRecordInts, " x Long on ", device);
  if (old.size(0) > num_params) return old;
  const Tensor grown = at::zeros({1 + num_params, kRecordInts}, options);
  grown.narrow(0, 0, old.size(0)).copy_(old);
  records[key] = grown;
  return grown;
}

// The rows of `records` say which gradients held inf or NaN.
void record_overflow(const Tensor& records, const std::vector<Gradient>& grads,
                     const std::vector<int64_t>& first_row, CheckArguments checked,
                     bool ends_step) {
  auto* rows = address_of<OverflowRecord>(records);
  OverflowArguments arguments{std::move(checked.grads),
                              {},
                              reinterpret_cast<OverflowHeader*>(rows),
                              checked.found_inf,
                              checked.grad_scale,
                              checked.unscale,
                              ends_step};
  for (const Gradient& grad : grads) {
    arguments.records.push_back(rows + first_row[grad.place.group] + grad.place.index);
  }
  DISPATCH(records.device(), record_overflow(arguments));
}

// Gradients that share a device and, of DTensors, placements.
struct Part {
  at::Device device;
  py::object dtensor;  // None, or the first of the parameters
  std::vector<Gradient> grads;
};

std::vector<Gradient>& part_of(std::vector<Part>& parts, const py::object& dtensor,
                               const at::Device& device, const Place& place) {
  for (Part& part : parts) {
    if (dtensor.is_none() || part.dtensor.is_none()) {
      if (dtensor.is(part.dtensor) && device == part.device) return part.grads;
      continue;
    }
    TORCH_CHECK_VALUE(dtensor.attr("device_mesh").equal(part.dtensor.attr("device_mesh")), place,
                      " is on another device mesh than those before it, so that no one all-reduce "
                      "can tell all of them of an overflow; give each mesh an optimizer");
    if (device == part.device &&
        dtensor.attr("placements").equal(part.dtensor.attr("placements"))) {
      return part.grads;
    }
  }
  return parts.emplace_back(Part{device, dtensor, {}}).grads;
}

// One pass over the gradients of an optimizer. Returns [(found_inf, norm or None, dtensor or None)]
// for each device, and of DTensors for each kind of placements, which the DTensor shows.
py::list check(const py::list& param_groups, const optional<Tensor>& grad_scale, bool unscale,
               optional<double> norm_type, py::dict workspaces, const optional<py::dict>& records) {
  const c10::NoGradGuard no_grad;
  const Norm norm = norm_of_type(norm_type);
  std::vector<Part> parts;
  std::vector<std::pair<Tensor, Tensor>>
      copies;  // a gradient that is not dense, and its dense copy

  // Of all DTensors, with a gradient here or not: the others of their mesh wait for this process.
  for_each_param(param_groups, [&](PyObject* object, const Tensor& param, const Place& place) {
    const Tensor& shard = local(param);
    if (!shard.is_same(param))
      part_of(parts, py::reinterpret_borrow<py::object>(object), shard.device(), place);
  });
  for_each_grad(param_groups, [&](PyObject* object, const Tensor& param, const Tensor& found,
                                  const Place& place) {
    const bool is_dtensor = !param.is_same(THPVariable_Unpack(object));
    const py::object dtensor =
        is_dtensor ? py::reinterpret_borrow<py::object>(object) : py::object(py::none());
    Tensor grad = found;
    if (grad.is_sparse()) {
      // As torch does: of duplicates that are still to be added up, fp16's sum may overflow.
      if (grad.scalar_type() == at::kHalf) grad = param.mutable_grad() = grad.coalesce();
      grad = grad._values();
    }
    check_readable(grad, "gradient", place);
    TORCH_CHECK_VALUE(!unscale || grad.scalar_type() != at::kHalf,
                      "Attempting to unscale FP16 gradients. ",
                      "mixprec.SGD steps without unscale_: leave the call out, and clip by "
                      "scaler.clip_grad_norm_(optimizer, max_norm); or get float32 gradients from "
                      "half_weights(model, grad_dtype=torch.float32)");
    if (!grad.is_non_overlapping_and_dense()) {
      TORCH_CHECK(
          !unscale || at::has_internal_overlap(grad) != at::MemOverlap::Yes, "the gradient of ",
          place,
          " can't be unscaled in place: several of its elements share memory; clone() it first");
      copies.emplace_back(grad, grad.contiguous());
      grad = copies.back().second;
    }
    part_of(parts, dtensor, grad.device(), place).push_back({grad, place});
  });
  std::vector<int64_t> first_row{1};  // of each group in the records
  for (const auto& group : records ? param_groups : py::list()) {
    const auto params = py::cast<py::list>(py::cast<py::dict>(group)["params"]);
    first_row.push_back(first_row.back() + static_cast<int64_t>(params.size()));
  }

  py::list result;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [device, dtensor, grads] = parts[i];
    const auto scalars = at::TensorOptions().device(device).dtype(at::kFloat);
    const Tensor scale = scalar_on(grad_scale, device, "grad_scale");
    const Tensor found_inf = at::empty({}, scalars);
    const Tensor norm_out = norm == Norm::kNone ? Tensor() : at::empty({}, scalars);
    const py::object key = py::cast(device);
    Tensor workspace;
    if (device.is_cuda()) {
      if (!workspaces.contains(key))
        workspaces[key] = at::zeros({kCheckWorkspaceInts}, scalars.dtype(at::kInt));
      workspace = py::cast<Tensor>(workspaces[key]);
    }
    const Tensor rows = records ? records_on(*records, device, first_row.back() - 1) : Tensor();
    CheckArguments arguments{{},
                             address_of<float>(scale),
                             unscale,
                             norm,
                             address_of<float>(found_inf),
                             address_of<float>(norm_out),
                             address_of<void>(workspace)};
    for (const Gradient& grad : grads) arguments.grads.push_back(data_of(grad.tensor));
    DISPATCH(device, check(arguments));
    if (records) {
      const bool ends_step =
          std::none_of(parts.begin() + i + 1, parts.end(), [device = device](const Part& later) {
            return later.device == device &&
                   std::any_of(later.grads.begin(), later.grads.end(),
                               [](const Gradient& grad) { return grad.tensor.numel() > 0; });
          });
      record_overflow(rows, grads, first_row, std::move(arguments), ends_step);
    }
    if (unscale)
      for (const Gradient& grad : grads) bump_version(grad.tensor);
    result.append(py::make_tuple(
        found_inf, norm_out.defined() ? py::object(py::cast(norm_out)) : py::none(), dtensor));
  }
  if (unscale)
    for (auto& [grad, copy] : copies) grad.copy_(copy);
  return result;
}

void check_state(const Tensor& tensor, const char* name, const Tensor& scale, at::ScalarType dtype,
                 int64_t numel) {
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.numel() == numel &&
                  tensor.device() == scale.device() && tensor.is_contiguous() && has_memory(tensor),
              "the scaler's ", name, " must be ", numel, " x ", dtype, " on ", scale.device(),
              ", got ", tensor.numel(), " x ", tensor.scalar_type(), " on ", tensor.device(),
              "; make a new scaler, and load a state_dict() into it");
}

void update_scale(const Tensor& scale, const Tensor& growth_tracker, const Tensor& history,
                  const Tensor& found_inf, double growth_factor, double backoff_factor,
                  int growth_interval, double min_scale, double max_scale, int hysteresis) {
  check_device(scale.device());
  check_state(scale, "scale", scale, at::kFloat, 1);
  check_state(growth_tracker, "growth tracker", scale, at::kInt, 1);
  check_state(history, "history", scale, at::kInt, sizeof(ScaleHistory) / sizeof(int));
  const Tensor skipped = scalar_on(found_inf, scale.device(), "found_inf");
  const ScaleData data{address_of<float>(scale), address_of<int>(growth_tracker),
                       address_of<ScaleHistory>(history), address_of<float>(skipped)};
  const ScaleRule rule{growth_factor,
                       backoff_factor,
                       growth_interval,
                       static_cast<float>(min_scale),
                       static_cast<float>(max_scale),
                       hysteresis};
  DISPATCH(scale.device(), update_scale(data, rule));
  for (const Tensor& written : {scale, growth_tracker, history}) bump_version(written);
}

}  // namespace

void bind_scaler(py::module_& module) {
  using namespace pybind11::literals;
  module.def("check", &check, "param_groups"_a, "grad_scale"_a, "unscale"_a, "norm_type"_a,
             "workspaces"_a, "records"_a);
  module.def("update_scale", &update_scale, "scale"_a, "growth_tracker"_a, "history"_a,
             "found_inf"_a, "growth_factor"_a, "backoff_factor"_a, "growth_interval"_a,
             "min_scale"_a, "max_scale"_a, "hysteresis"_a);
}

}  // namespace mixprec
