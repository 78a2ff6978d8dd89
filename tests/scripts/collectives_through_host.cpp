// A process group backend for devices without collectives of their own: copies tensors to the host, and hands them to
// another backend, gloo. Results arrive in `wait()`, so that a missing wait shows. It refuses what NCCL does not take
// (`refuse`), or takes but answers with other values or a hang (`refuse_different`, `refuse_changed`), so that tests on
// such a device find calls that would fail on GPUs. And what torch_openreg lacks: another size of a storage, as FSDP
// asks for it, and attention that computes. For tests only.
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Result = c10::intrusive_ptr<c10d::Work>;

namespace {

Tensors on_host(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.to(at::kCPU).contiguous());
  return copies;
}

Lists on_host(const Lists& lists) {
  Lists copies;
  for (const auto& tensors : lists) copies.push_back(on_host(tensors));
  return copies;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

// What torch's NCCL backend knows (ncclDataType in NCCLUtils.hpp, torch 2.11 to 2.15).
bool has_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kChar: case at::kByte: case at::kInt: case at::kLong: case at::kBool:
    case at::kHalf: case at::kBFloat16: case at::kFloat: case at::kDouble:
    case at::kFloat8_e4m3fn: case at::kFloat8_e5m2: case at::kFloat8_e4m3fnuz: case at::kFloat8_e5m2fnuz:
      return true;
    default:
      return false;
  }
}

// NCCL reads memory as it lies, from the device alone. Where `takes_complex`, torch gives it the real view.
void refuse(const Tensor& tensor, const char* call, bool takes_complex = false) {
  TORCH_CHECK(tensor.device().type() == at::kPrivateUse1, "as NCCL: ", call, ": a tensor on ", tensor.device());
  TORCH_CHECK(tensor.device().index() == c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDevice().index(),
              "as NCCL: ", call, ": a tensor on ", tensor.device(), ", which is not the current device");
  TORCH_CHECK(tensor.layout() == at::kStrided, "as NCCL: ", call, ": a tensor that is not dense");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "as NCCL: ", call, ": a tensor of shape ",
              tensor.sizes(), " and strides ", tensor.strides(), ", which is not contiguous");
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "as NCCL: ", call, ": a lazily conjugated or negated tensor");
  TORCH_CHECK(has_dtype(tensor) || (takes_complex && tensor.is_complex()), "as NCCL: ", call, ": a tensor of ",
              tensor.scalar_type());
}

void refuse(const Tensors& tensors, const char* call, bool takes_complex = false) {
  for (const auto& tensor : tensors) refuse(tensor, call, takes_complex);
}

void refuse(const c10d::ReduceOp& operation, const Tensors& tensors, const char* call) {
  for (auto bits : {c10d::ReduceOp::BAND, c10d::ReduceOp::BOR, c10d::ReduceOp::BXOR})
    TORCH_CHECK(operation != bits, "as NCCL: ", call, ": a reduction of bits");
  for (const auto& tensor : tensors) {
    auto is_mean = operation == c10d::ReduceOp::AVG;
    TORCH_CHECK(!at::isFloat8Type(tensor.scalar_type()), "as NCCL: ", call, ": a reduction in ", tensor.scalar_type());
    TORCH_CHECK(!is_mean || at::isFloatingType(tensor.scalar_type()) || tensor.is_complex(), "as NCCL: ", call,
                ": a mean in ", tensor.scalar_type());  // of integers NCCL's is rounded
    TORCH_CHECK(!tensor.is_complex() || is_mean || operation == c10d::ReduceOp::SUM, "as NCCL: ", call,
                ": complex values are only added");
  }
}

constexpr int64_t TEXT_BYTES = 2048;

bool has_memory(const Tensor& tensor) { return tensor.storage().nbytes() > 0 && tensor.numel() > 0; }

struct Arrival : c10d::Work {
  Arrival(Tensors to, Tensors from, Tensors sent, Result inner, double divisor)
      : to_(std::move(to)), from_(std::move(from)), inner_(std::move(inner)), divisor_(divisor) {
    for (const auto& tensor : sent) sent_.emplace_back(tensor, tensor.to(at::kCPU).contiguous());
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  void synchronize() override { arrive(); }
  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    arrive();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(std::chrono::milliseconds(0));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(to_));
    return future;
  }

 private:
  void arrive() {
    at::NoGradGuard no_grad;
    if (!arrived_) refuse_changed();
    for (size_t i = 0; i < to_.size() && !arrived_; i++)
      to_[i].copy_(divisor_ == 1 ? from_[i] : from_[i] / divisor_);
    arrived_ = true;
  }

  // NCCL reads it at some time before the end of `wait`. Memory that was given back may belong to others.
  void refuse_changed() {
    for (const auto& [tensor, copy] : sent_) {
      if (!has_memory(tensor)) continue;
      auto now = tensor.to(at::kCPU).contiguous();
      TORCH_CHECK(!std::memcmp(now.data_ptr(), copy.data_ptr(), copy.nbytes()),
                  "as NCCL: a tensor was written to while it was sent");
    }
  }

  Tensors to_, from_;
  std::vector<std::pair<Tensor, Tensor>> sent_;
  Result inner_;
  double divisor_;
  bool arrived_ = false;
};

struct ThroughHost : c10d::Backend {
  explicit ThroughHost(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "through_host"; }

  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    refuse(tensors, "broadcast", true);
    refuse_different("broadcast", tensors);
    auto host = on_host(tensors);
    return arrival(tensors, host, {}, inner_->broadcast(host, options));
  }
  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_reduction("all_reduce", tensors, tensors, options.reduceOp, true);
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host(tensors);
    return arrival(tensors, host, tensors, inner_->allreduce(host, plain), divisor);
  }
  Result allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    refuse(in, "all_gather");
    for (const auto& tensor : flat(out))
      TORCH_CHECK(tensor.device() == in[0].device() && tensor.sizes() == in[0].sizes() && has_dtype(tensor),
                  "as NCCL: all_gather: an output on another device, or of another shape or dtype");
    refuse_different("all_gather", in);
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(flat(out), flat(host_out), in, inner_->allgather(host_out, host_in, options));
  }
  Result _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    refuse({out, in}, "all_gather_into_tensor");
    refuse_different("all_gather_into_tensor", {in});
    auto host = on_host({out, in});
    return arrival({out}, {host[0]}, sent_beside({in}, {out}), inner_->_allgather_base(host[0], host[1], options));
  }
  Result _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    check_reduction("reduce_scatter_tensor", {out}, {in}, options.reduceOp);
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host({out, in});
    auto work = inner_->_reduce_scatter_base(host[0], host[1], plain);
    return arrival({out}, {host[0]}, sent_beside({in}, {out}), work, divisor);
  }
  Result allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    refuse(out, "all_gather_into_tensor_coalesced");
    refuse(in, "all_gather_into_tensor_coalesced");
    refuse_different("all_gather_into_tensor_coalesced", in);
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    auto work = inner_->allgather_into_tensor_coalesced(host_out, host_in, options);
    return arrival(out, host_out, sent_beside(in, out), work);
  }
  Result reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    check_reduction("reduce_scatter_tensor_coalesced", out, in, options.reduceOp);
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    auto work = inner_->reduce_scatter_tensor_coalesced(host_out, host_in, plain);
    return arrival(out, host_out, sent_beside(in, out), work, divisor);
  }
  Result allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check_reduction("all_reduce_coalesced", tensors, tensors, options.reduceOp);
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host(tensors);
    return arrival(tensors, host, tensors, inner_->allreduce_coalesced(host, plain), divisor);
  }
  Result scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    refuse(out, "scatter");
    refuse(flat(in), "scatter");
    refuse_different("scatter", out);
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(out, host_out, {}, inner_->scatter(host_out, host_in, options));
  }
  Result alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                       const c10d::AllToAllOptions& options) override {
    refuse({out, in}, "all_to_all_single");
    refuse_different("all_to_all_single", {});  // messages may differ in size
    auto host = on_host({out, in});
    auto work = inner_->alltoall_base(host[0], host[1], out_splits, in_splits, options);
    return arrival({out}, {host[0]}, {in}, work);
  }
  Result barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

 private:
  Result arrival(Tensors to, Tensors from, Tensors sent, Result inner, double divisor = 1) {
    return c10::make_intrusive<Arrival>(std::move(to), std::move(from), std::move(sent), std::move(inner), divisor);
  }
  // Those that do not lie in what is received, as a rank's own part of a gather does.
  Tensors sent_beside(const Tensors& sent, const Tensors& received) {
    Tensors others;
    for (const auto& tensor : sent) {
      auto is_same = [&](const Tensor& other) { return other.storage().is_alias_of(tensor.storage()); };
      if (std::none_of(received.begin(), received.end(), is_same)) others.push_back(tensor);
    }
    return others;
  }
  void check_reduction(const char* call, const Tensors& out, const Tensors& in, const c10d::ReduceOp& operation,
                       bool takes_complex = false) {
    refuse(out, call, takes_complex);
    refuse(in, call, takes_complex);
    refuse(operation, in, call);
    refuse_different(call, in);
  }
  // All ranks must make the same calls in the same order, over all groups, with tensors that lie alike in memory.
  void refuse_different(const char* call, const Tensors& tensors) {
    static std::atomic<int64_t> calls = 0;
    auto text = c10::str("call ", calls++, " of the process, ", call);
    for (const auto& tensor : tensors) {
      auto strides = tensor.strides().vec();
      for (int64_t dim = 0; dim < tensor.dim(); dim++)
        if (tensor.size(dim) == 1) strides[dim] = 0;  // any stride leads to the same memory
      text += c10::str(", ", tensor.scalar_type(), " of shape ", tensor.sizes(), " and strides ", at::IntArrayRef(strides));
    }
    auto length = static_cast<int64_t>(std::min<size_t>(text.size(), TEXT_BYTES));
    Tensors own = {at::zeros({TEXT_BYTES}, at::kByte)};
    std::memcpy(own[0].data_ptr(), text.data(), length);
    Lists all = {{}};
    for (int rank = 0; rank < getSize(); rank++) all[0].push_back(at::empty_like(own[0]));
    inner_->allgather(all, own)->wait();
    for (const auto& other : all[0])
      TORCH_CHECK(at::equal(other, own[0]), "as NCCL: ranks differ: \"", text, "\" here, \"",
                  static_cast<const char*>(other.data_ptr()), "\" there");
  }
  double without_mean(c10d::ReduceOp& operation) {  // gloo has no mean
    if (operation != c10d::ReduceOp::AVG) return 1;
    operation = c10d::ReduceOp::SUM;
    return getSize();
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

// Torch asks the device's hooks for this, and torch_openreg's have no answer.
void resize(const Tensor& of_storage, int64_t bytes) {
  auto* storage = of_storage.storage().unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage->device());
  auto data = storage->allocator()->allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes()))
    storage->allocator()->copy_data(data.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

int64_t by_operators(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                     std::optional<double>, bool) {
  return 0;  // SDPBackend.MATH
}

// Its own attention returns memory as it finds it.
void attend_by_operators() { at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&by_operators); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<ThroughHost, c10d::Backend, c10::intrusive_ptr<ThroughHost>>(module, "ThroughHost");
  module.def("through_host", [](c10::intrusive_ptr<c10d::Backend> inner) {
    return c10::make_intrusive<ThroughHost>(std::move(inner));
  });
  module.def("resize", &resize);
  module.def("attend_by_operators", &attend_by_operators);
}
