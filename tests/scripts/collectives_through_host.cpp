// A process group backend for devices without collectives of their own: copies tensors to the host, and hands them to
// another backend, gloo. Results arrive in `wait()`, so that a missing wait shows. And what torch_openreg lacks: another
// size of a storage, as FSDP asks for it, and attention that computes. For tests only.
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

struct Arrival : c10d::Work {
  Arrival(Tensors to, Tensors from, Result inner, double divisor)
      : to_(std::move(to)), from_(std::move(from)), inner_(std::move(inner)), divisor_(divisor) {}

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
    for (size_t i = 0; i < to_.size() && !arrived_; i++)
      to_[i].copy_(divisor_ == 1 ? from_[i] : from_[i] / divisor_);
    arrived_ = true;
  }

  Tensors to_, from_;
  Result inner_;
  double divisor_;
  bool arrived_ = false;
};

struct ThroughHost : c10d::Backend {
  explicit ThroughHost(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "through_host"; }

  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return arrival(tensors, host, inner_->broadcast(host, options));
  }
  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host(tensors);
    return arrival(tensors, host, inner_->allreduce(host, plain), divisor);
  }
  Result allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(flat(out), flat(host_out), inner_->allgather(host_out, host_in, options));
  }
  Result _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto host = on_host({out, in});
    return arrival({out}, {host[0]}, inner_->_allgather_base(host[0], host[1], options));
  }
  Result _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host({out, in});
    return arrival({out}, {host[0]}, inner_->_reduce_scatter_base(host[0], host[1], plain), divisor);
  }
  Result allgather_into_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(out, host_out, inner_->allgather_into_tensor_coalesced(host_out, host_in, options));
  }
  Result reduce_scatter_tensor_coalesced(
      Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(out, host_out, inner_->reduce_scatter_tensor_coalesced(host_out, host_in, plain), divisor);
  }
  Result allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto plain = options;
    auto divisor = without_mean(plain.reduceOp);
    auto host = on_host(tensors);
    return arrival(tensors, host, inner_->allreduce_coalesced(host, plain), divisor);
  }
  Result scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    auto host_in = on_host(in);
    auto host_out = on_host(out);
    return arrival(out, host_out, inner_->scatter(host_out, host_in, options));
  }
  Result alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                       const c10d::AllToAllOptions& options) override {
    auto host = on_host({out, in});
    return arrival({out}, {host[0]}, inner_->alltoall_base(host[0], host[1], out_splits, in_splits, options));
  }
  Result barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

 private:
  Result arrival(Tensors to, Tensors from, Result inner, double divisor = 1) {
    return c10::make_intrusive<Arrival>(std::move(to), std::move(from), std::move(inner), divisor);
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
