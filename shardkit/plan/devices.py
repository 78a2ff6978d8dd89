"""Devices to plan for: memory, peak FLOPS, links. Peaks are the vendors'; training reaches less."""

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardkit.config.hardware import multiplies_in
from shardkit.errors import UsageError
from shardkit.sizes import GIB, MIB, read_bytes

# Memory of a CUDA process in addition to tensors: context, NCCL's buffers, cuBLAS workspaces. An assumption, printed
# with every plan: a context takes around 0.5 GiB, and NCCL allocates a few hundred MiB per communicator.
RESERVE_BYTES = 2 * GIB
# Host memory of a rank in addition to tensors: Python, torch with CUDA's libraries, pinned batches, workers of loaders.
# An assumption, printed where a plan has something in host memory, and what `shardkit submit` asks for.
HOST_RESERVE_BYTES = 8 * GIB
# Part of a device that should stay free for fragmentation and peaks before a strategy is suggested.
SPARE = 0.2
LARGEST_BYTES = 10 * 2**40
"""More than this is no device's memory."""


@dataclass(frozen=True)
class Efficiency:
    """Fraction of peak FLOPS that training reaches, including recomputation: lowest, typical, highest."""

    low: float
    typical: float
    high: float
    source: str


# Dense Transformers under FSDP, sequences of 512 to 65,536, bf16; the lowest and the highest of the table, typical the
# median up to 8,192 tokens. Attention's masked scores count as computed there.
# https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md
_PUBLISHED = "published: llm-foundry's benchmarks"
EFFICIENCIES = {
    ("H100", False): Efficiency(0.32, 0.40, 0.46, f"{_PUBLISHED} on H100"),
    ("H100", True): Efficiency(0.35, 0.54, 0.59, f"{_PUBLISHED} on H100 with recomputation"),
    ("A100", False): Efficiency(0.43, 0.55, 0.64, f"{_PUBLISHED} on A100"),
    ("A100", True): Efficiency(0.48, 0.70, 0.79, f"{_PUBLISHED} on A100 with recomputation"),
}
# What those runs have in common: at least 0.76 billion parameters on H100 (0.125 on A100), at least 4,096 tokens in a
# micro-batch, 8 to 64 ranks on H100, up to 128 on A100 (torchtitan's on 128 H100 are 3 % slower than on 8).
PUBLISHED_NUMEL, PUBLISHED_TOKENS, PUBLISHED_SEQ_LEN, PUBLISHED_RANKS = 760_000_000, 4096, 65_536, 128
# Without a published value. On one H200, `make gpu` measured 0.48 to 0.50 in bf16, 0.54 to 0.62 with recomputation, and
# 0.70 in fp32, whose peak is that of units which few kernels leave idle (docs/reference/plan-accuracy.md).
ASSUMED = Efficiency(0.25, 0.40, 0.65, "assumed: no published value is used for it")
ASSUMED_FP32 = Efficiency(0.25, 0.50, 0.75, "assumed: no published value is used for fp32")


@dataclass(frozen=True)
class Device:
    """One kind of device. `flops`: peak dense FLOPS by compute dtype, with fp32 accumulation.

    link_bytes_per_s: bandwidth of one device to others on its machine; network_bytes_per_s: to other machines while all
    send; both in one direction, 0 if unknown. `memory_bytes`: as shown by the driver, or None. `joined`: devices that
    the links join, where these are more than one machine's. `host_bytes`: host memory of its machine for one device, or
    None; of vendors' own systems, which others need not follow.
    """

    name: str
    memory_bytes: int | None
    flops: dict[str, float]
    link_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    reserve_bytes: int = RESERVE_BYTES
    ranks_per_machine: int = 8
    joined: int = 0
    host_bytes: int | None = None

    def fits(self, peak_bytes: int, offloaded_bytes: int = 0) -> bool | None:
        """Whether a rank with that peak and the reserve fits, and what it offloads; None if the memory is unknown."""
        if not self.host_has_room(offloaded_bytes):
            return False
        return None if self.memory_bytes is None else peak_bytes + self.reserve_bytes <= self.memory_bytes

    def host_has_room(self, offloaded_bytes: int) -> bool:
        """Whether a rank's part of the host memory has room for so much; True where there is nothing, or that is not
        known."""
        if not offloaded_bytes or self.host_bytes is None:
            return True
        return offloaded_bytes + HOST_RESERVE_BYTES <= self.host_bytes

    @property
    def has_caching_allocator(self) -> bool:
        """Whether torch's caching allocator reserves memory in segments, as on GPUs."""
        return bool(self.reserve_bytes) and not self.is_tpu

    @property
    def is_tpu(self) -> bool:
        return self.name.startswith("TPU")

    @property
    def joined_name(self) -> str:
        """What the links join: a machine, a rack of several, or a pod of TPUs."""
        return "machine" if not self.joined else "pod" if self.is_tpu else "rack"

    def efficiency(self, compute: str, recomputes: bool) -> Efficiency:
        """Fraction of peak FLOPS reached in this dtype, with or without recomputation."""
        if compute == "fp32":
            return ASSUMED_FP32
        kind = re.sub(r" \d+ GB$", "", self.name)
        return EFFICIENCIES.get((kind, recomputes), ASSUMED) if compute == "bf16" else ASSUMED

    @property
    def lacks_bf16(self) -> bool:
        """Whether it is known not to compute in bf16."""
        return bool(self.flops) and "bf16" not in self.flops

    def multiplies_in(self, dtype: str) -> bool | None:
        """Whether it multiplies matrices in fp8 or mxfp8; None where that is not known."""
        known = (value for name, value in CAPABILITIES.items() if re.match(rf"{name}\b", self.name))
        return multiplies_in(next(known, None), dtype)

    def fits_with_spare(self, peak_bytes: int) -> bool | None:
        """As `fits`, with SPARE of the memory left free."""
        if self.memory_bytes is None:
            return None
        return peak_bytes + self.reserve_bytes <= (1 - SPARE) * self.memory_bytes


def _peaks(bits_16: float, fp32: float) -> dict[str, float]:
    """`Device.flops` of one that computes equally fast in bf16 and fp16."""
    return {"bf16": bits_16, "fp16": bits_16, "fp32": fp32}


# Host memory: NVIDIA's own systems, of which other machines have half to twice as much.
#   DGX-1 (V100) 512 GB, DGX A100 1 TB with 40 GB devices and 2 TB with 80 GB, DGX H100 and H200 2 TB
#   (https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html),
#   DGX B200 and B300 2 TB or 4 TB; GH200 480 GB; GB200 and GB300 NVL72 17 TB of LPDDR5X for 72 devices (their pages).
_GB = 10**9
# Memory: nvidia-smi's total. fp32 is TF32 off, torch's default for matrix products.
# A100: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf
#   bf16 312, fp32 19.5 TFLOPS; NVLink 600 GB/s both directions together; DGX A100: eight 200 Gb/s adapters.
# H100 SXM: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
#   bf16 1,979 with sparsity = 989 dense, fp32 67 TFLOPS; NVLink 900 GB/s; DGX H100: eight 400 Gb/s adapters.
# H200: https://www.nvidia.com/en-us/data-center/h200/  arithmetic and NVLink of H100, 141 GB.
# B200: https://resources.nvidia.com/en-us-blackwell-architecture  HGX: bf16 2,250 dense, fp32 75 to 80 TFLOPS,
#   180 GB, NVLink 1.8 TB/s; DGX B200: eight 400 Gb/s adapters.
# L4: https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet  bf16 242 with sparsity = 121 dense,
#   fp32 30.3 TFLOPS, PCIe 4.0 x16 (64 GB/s both directions together).
# RTX 4090: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
#   bf16 and fp16 165.2 (fp32 accumulation), fp32 82.6 TFLOPS, PCIe 4.0 x16.
# TPU v5e: https://cloud.google.com/tpu/docs/v5e  bf16 197 TFLOPS, 16 GB, 400 GB/s between the chips of a pod of 256
#   over four links, both directions together; 6.4 Tb/s of data centre network for a pod.
# H100 with 96 GB of HBM2e: SXM's peak is taken; 400 Gb/s a device to others, as in
#   https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
# GH200: https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip  bf16 990 dense, fp32 67 TFLOPS, 96 GB,
#   NVLink 900 GB/s both directions together.
# GB200 NVL72: https://www.nvidia.com/en-us/data-center/gb200-nvl72/  for 72 devices bf16 360 PFLOPS with sparsity, so
#   2,500 TFLOPS dense each, fp32 5,760 TFLOPS, 13.4 TB; NVLink 1.8 TB/s each, both directions together. A machine has
#   four of the 72.
# GB300 NVL72: https://www.nvidia.com/en-us/data-center/gb300-nvl72/  arithmetic and NVLink of GB200; 800 Gb/s adapters.
# A10: https://www.nvidia.com/en-us/data-center/products/a10-gpu/  bf16 125 dense, fp32 31.2 TFLOPS, PCIe 4.0 x16.
# A10G (AWS): https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
#   bf16 70 dense, fp32 35 TFLOPS, PCIe 4.0 x16.
# B300: https://www.nvidia.com/en-us/data-center/hgx/  for eight devices bf16 36 PFLOPS with sparsity, so 2,250 TFLOPS
#   dense each, fp32 600 TFLOPS, NVLink 1.8 TB/s each, both directions together; DGX B300: eight 800 Gb/s adapters.
# RTX 5090: https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
#   bf16 and fp16 209.5 (fp32 accumulation), fp32 104.8 TFLOPS, PCIe 5.0 x16.
# V100 SXM2: https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
#   fp16 125, fp32 15.7 TFLOPS, no bf16; NVLink 300 GB/s both directions together; DGX-1: four 100 Gb/s adapters.
# RTX 3090: NVIDIA's whitepaper of GA102 (Ampere GA102 GPU Architecture, version 1), table 2:
#   bf16 and fp16 71 (fp32 accumulation), fp32 35.6 TFLOPS, PCIe 4.0 x16.
# MI300X: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html  bf16 1,307 dense, fp32 163.4 TFLOPS,
#   192 GB, Infinity Fabric 896 GB/s both directions together; eight 400 Gb/s adapters are assumed.
# MI325X: https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html  256 GB, otherwise as MI300X.
# MI350X: https://www.amd.com/en/products/accelerators/instinct/mi350/mi350x.html  bf16 2,300 dense, fp32 144.2 TFLOPS.
# MI355X: https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html  bf16 2,500 dense, fp32 157.3 TFLOPS.
#   Both: 288 GB, seven Infinity Fabric links of 153 GB/s, both directions together; adapters as of MI300X, assumed.
# MI250X: https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html  bf16 383 dense, fp32 95.7 TFLOPS
#   (of matrices), 128 GB. It is two devices, each with half of these (https://rocm.docs.amd.com, "MI250
#   microarchitecture"); one Infinity Fabric link of 50 GB/s in one direction is taken, the least between neighbours;
#   Frontier and LUMI have four 200 Gb/s adapters for eight devices. MI250: bf16 362.1, fp32 90.5 TFLOPS, otherwise the
#   same.
# A800, H800: A100 and H100 with NVLink of 400 GB/s, both directions together (https://arxiv.org/abs/2505.09343, section
#   4.1, of H800; NVIDIA's statement on A800 of November 2022).
# TPU v5p: https://cloud.google.com/tpu/docs/v5p  bf16 459 TFLOPS, 95 GB, 1,200 GB/s between the chips of a pod of
#   8,960, both directions together, 50 Gb/s of data centre network a chip, four chips a machine.
# TPU v6e: https://cloud.google.com/tpu/docs/v6e  bf16 918 TFLOPS, 32 GB, 800 GB/s between the chips of a pod of 256,
#   both directions together; 100 Gb/s of data centre network a chip (https://cloud.google.com/tpu/docs/tpu7x).
# TPU7x: https://cloud.google.com/tpu/docs/tpu7x  a chip has bf16 2,307 TFLOPS, 192 GB, 1,200 GB/s to the others of a
#   pod of 9,216, both directions together, 100 Gb/s of data centre network; it is two devices, each with half of these,
#   and a machine has four chips.
# H100 PCIe and NVL: datasheet of H100 SXM and NVIDIA's product briefs. PCIe: bf16 1,513 with sparsity = 756 dense, fp32
#   51 TFLOPS, PCIe 5.0 x16 (128 GB/s both directions together). NVL: bf16 1,671 with sparsity = 835 dense, fp32 60
#   TFLOPS, 94 GB; NVLink joins two of them, so PCIe 5.0 is taken.
# H200 NVL: https://www.nvidia.com/en-us/data-center/h200/  arithmetic of H100 NVL, 141 GB; NVLink joins two or four, so
#   PCIe 5.0 is taken.
# A100 PCIe: datasheet of A100: its arithmetic, PCIe 4.0 x16. V100 PCIe: datasheet of V100: fp16 112, fp32 14 TFLOPS,
#   PCIe 3.0 x16. Both have boards of two sizes.
# H20: NVIDIA's data sheet of it  bf16 148 dense, fp32 44 TFLOPS, 96 GB, NVLink of H100; eight 400 Gb/s adapters.
# L40S: https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413  bf16 362 dense, fp32 91.6 TFLOPS, PCIe 4.0 x16.
# L40: https://www.nvidia.com/en-us/data-center/l40/  bf16 181 dense, fp32 90.5 TFLOPS, PCIe 4.0 x16.
# RTX 6000 Ada: https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf
#   bf16 364.2 dense, fp32 91.1 TFLOPS, PCIe 4.0 x16.
# RTX PRO 6000 Blackwell: NVIDIA's whitepaper "NVIDIA RTX Blackwell GPU Architecture", of its workstation edition
#   bf16 and fp16 503.8 (fp32 accumulation), fp32 126 TFLOPS, 96 GB, PCIe 5.0 x16. Max-Q has a tenth less.
# A40: https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf  bf16 149.7 dense, fp32 37.4
#   TFLOPS, PCIe 4.0 x16.
# RTX A6000: NVIDIA's whitepaper of GA102 (version 2)  bf16 154.8 dense, fp32 38.7 TFLOPS, PCIe 4.0 x16.
# T4: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
#   fp16 65, fp32 8.1 TFLOPS, no bf16; PCIe 3.0 x16 (32 GB/s both directions together).
# Gaudi 3: Intel's white paper "Intel Gaudi 3 AI Accelerator"  bf16 1,835 TFLOPS, 128 GB, 24 ports of 200 Gb/s, of which
#   21 join the eight of a machine in Intel's reference design, and 3 lead to others. Gaudi 2: bf16 432 TFLOPS, 96 GB,
#   ports of 100 Gb/s, otherwise the same. No peak in fp32 or fp16 is taken.
# Max 1550: two devices, its stacks, each with half of 128 cores, 128 GB and 1.6 GHz; a cycle of a core has 4,096
#   operations in bf16 and 256 in fp32
#   (https://www.intel.com/content/www/us/en/developer/articles/technical/intel-data-center-gpu-max-series-overview.html).
#   One Xe Link of 26.5 GB/s in one direction is taken, as the least between neighbours. A machine as in Aurora: twelve
#   devices, eight 200 Gb/s adapters, 1 TB (https://docs.alcf.anl.gov/aurora/hardware-overview/machine-overview/).
# Machines with devices without NVLink (A10, L4, T4, RTX, boards for PCIe, ...): one 100 Gb/s adapter shared by eight
#   devices, an assumption.
# CPU: 0.1 TFLOPS a rank and 10 Gb/s between machines, round numbers to replace by your own.
DEVICES = {
    "a100-pcie": Device("A100 PCIe", 81920 * MIB, _peaks(312e12, 19.5e12), 32e9, 1.5e9),
    "a100-40": Device("A100 40 GB", 40960 * MIB, _peaks(312e12, 19.5e12), 300e9, 25e9, host_bytes=128 * _GB),
    "a100-80": Device("A100 80 GB", 81920 * MIB, _peaks(312e12, 19.5e12), 300e9, 25e9, host_bytes=256 * _GB),
    "a800-80": Device("A800 80 GB", 81920 * MIB, _peaks(312e12, 19.5e12), 200e9, 25e9),
    "h100-pcie": Device("H100 PCIe 80 GB", 81559 * MIB, _peaks(756e12, 51e12), 64e9, 1.5e9),
    "h100-nvl": Device("H100 NVL 94 GB", 95830 * MIB, _peaks(835e12, 60e12), 64e9, 1.5e9),
    "h100-96": Device("H100 96 GB", 97871 * MIB, _peaks(989e12, 67e12), 450e9, 50e9),
    "h100-80": Device("H100 80 GB", 81559 * MIB, _peaks(989e12, 67e12), 450e9, 50e9, host_bytes=256 * _GB),
    "h800-80": Device("H800 80 GB", 81559 * MIB, _peaks(989e12, 67e12), 200e9, 50e9),
    "gh200-96": Device("GH200 96 GB", 97871 * MIB, _peaks(990e12, 67e12), 450e9, 50e9, host_bytes=480 * _GB),
    "gb200-186": Device(
        "GB200", 189471 * MIB, _peaks(2500e12, 80e12), 900e9, 50e9, ranks_per_machine=4, joined=72, host_bytes=236 * _GB
    ),
    "gb300-288": Device(
        "GB300",
        284208 * MIB,
        _peaks(2500e12, 80e12),
        900e9,
        100e9,
        ranks_per_machine=4,
        joined=72,
        host_bytes=236 * _GB,
    ),
    "h20-96": Device("H20 96 GB", 97871 * MIB, _peaks(148e12, 44e12), 450e9, 50e9),
    "v100-pcie": Device("V100 PCIe", 16384 * MIB, {"fp16": 112e12, "fp32": 14e12}, 16e9, 1.5e9),
    "v100-16": Device("V100 16 GB", 16384 * MIB, {"fp16": 125e12, "fp32": 15.7e12}, 150e9, 6.25e9, host_bytes=64 * _GB),
    "v100-32": Device("V100 32 GB", 32768 * MIB, {"fp16": 125e12, "fp32": 15.7e12}, 150e9, 6.25e9, host_bytes=64 * _GB),
    "t4-16": Device("T4 16 GB", 15360 * MIB, {"fp16": 65e12, "fp32": 8.1e12}, 16e9, 1.5e9),
    "a40-48": Device("A40 48 GB", 46068 * MIB, _peaks(149.7e12, 37.4e12), 32e9, 1.5e9),
    "a6000-48": Device("RTX A6000", 49140 * MIB, _peaks(154.8e12, 38.7e12), 32e9, 1.5e9),
    "l40s-48": Device("L40S 48 GB", 46068 * MIB, _peaks(362e12, 91.6e12), 32e9, 1.5e9),
    "6000-pro-96": Device("RTX PRO 6000", 97887 * MIB, _peaks(503.8e12, 126e12), 64e9, 1.5e9),
    "6000-ada-48": Device("RTX 6000 Ada", 49140 * MIB, _peaks(364.2e12, 91.1e12), 32e9, 1.5e9),
    "l40-48": Device("L40 48 GB", 46068 * MIB, _peaks(181e12, 90.5e12), 32e9, 1.5e9),
    "a10g-24": Device("A10G 24 GB", 23028 * MIB, _peaks(70e12, 35e12), 32e9, 1.5e9),
    "a10-24": Device("A10 24 GB", 23028 * MIB, _peaks(125e12, 31.2e12), 32e9, 1.5e9),
    "3090-24": Device("RTX 3090", 24576 * MIB, _peaks(71e12, 35.6e12), 32e9, 1.5e9),
    "mi250-64": Device("MI250", 65520 * MIB, _peaks(181e12, 45.2e12), 50e9, 12.5e9),
    "mi250x-64": Device("MI250X", 65520 * MIB, _peaks(191.5e12, 47.8e12), 50e9, 12.5e9),
    "mi300x-192": Device("MI300X", 196608 * MIB, _peaks(1307e12, 163.4e12), 448e9, 50e9),
    "mi325x-256": Device("MI325X", 262144 * MIB, _peaks(1307e12, 163.4e12), 448e9, 50e9),
    "mi350x-288": Device("MI350X", 294896 * MIB, _peaks(2300e12, 144.2e12), 535e9, 50e9),
    "mi355x-288": Device("MI355X", 294896 * MIB, _peaks(2500e12, 157.3e12), 535e9, 50e9),
    "h200-nvl": Device("H200 NVL 141 GB", 143771 * MIB, _peaks(835e12, 60e12), 64e9, 1.5e9),
    "h200-141": Device("H200 141 GB", 143771 * MIB, _peaks(989e12, 67e12), 450e9, 50e9, host_bytes=256 * _GB),
    "b200-180": Device("B200 180 GB", 183359 * MIB, _peaks(2250e12, 75e12), 900e9, 50e9, host_bytes=256 * _GB),
    "b300-288": Device("B300", 275040 * MIB, _peaks(2250e12, 75e12), 900e9, 100e9, host_bytes=256 * _GB),
    "l4-24": Device("L4 24 GB", 23034 * MIB, _peaks(121e12, 30.3e12), 32e9, 1.5e9),
    "4090-24": Device("RTX 4090", 24564 * MIB, _peaks(165.2e12, 82.6e12), 32e9, 1.5e9),
    "5090-32": Device("RTX 5090", 32607 * MIB, _peaks(209.5e12, 104.8e12), 64e9, 1.5e9),
    "gaudi2-96": Device("Gaudi 2", 98304 * MIB, {"bf16": 432e12}, 262.5e9, 37.5e9),
    "gaudi3-128": Device("Gaudi 3", 131072 * MIB, {"bf16": 1835e12}, 525e9, 75e9),
    "max1550-64": Device(
        "Max 1550", 65536 * MIB, _peaks(419.4e12, 26.2e12), 26.5e9, 16.7e9, ranks_per_machine=12, host_bytes=85 * _GB
    ),
    "tpu-v5e": Device("TPU v5e", 16 * GIB, {"bf16": 197e12}, 200e9, 3.1e9, joined=256),
    "tpu-v5p": Device("TPU v5p", 95 * GIB, {"bf16": 459e12}, 600e9, 6.25e9, ranks_per_machine=4, joined=8960),
    "tpu-v7x": Device("TPU7x", 96 * GIB, {"bf16": 1153.5e12}, 300e9, 6.25e9, joined=18432),
    "tpu-v6e": Device("TPU v6e", 32 * GIB, {"bf16": 918e12}, 400e9, 12.5e9, joined=256),
    "cpu": Device("CPU", None, _peaks(0.1e12, 0.1e12), 10e9, 1.25e9, reserve_bytes=0),
}

# https://developer.nvidia.com/cuda-gpus
CAPABILITIES = {
    **{"V100": 7.0, "T4": 7.5, "A100": 8.0, "A800": 8.0},
    **{"A10": 8.6, "A10G": 8.6, "A40": 8.6, "RTX A6000": 8.6, "RTX 3090": 8.6},
    **{"L4": 8.9, "L40": 8.9, "L40S": 8.9, "RTX 4090": 8.9, "RTX 6000 Ada": 8.9},
    **{"H20": 9.0, "H100": 9.0, "H800": 9.0, "GH200": 9.0, "H200": 9.0},
    **{"B200": 10.0, "GB200": 10.0, "B300": 10.3, "GB300": 10.3},
    **{"RTX 5090": 12.0, "RTX PRO 6000": 12.0},
}
"""NVIDIA's compute capability by the beginning of a device's name."""

_NUMBERED = re.compile(r"\b(gaudi|max)[\s_-]+(?=\d)")
"""Names that are written with and without a space before the number: Gaudi 3, GAUDI3."""

LESS = {"mig", "laptop"}
"""Words in names of GPUs of less than the peak, by an unknown part: parts of a GPU (MIG), GPUs for laptops."""


def find(name: str, memory_bytes: int | None = None) -> Device:
    """The device of that name, or one given by its memory: 80GiB. A name without a size (h100) means the last match in
    the table; words that drivers add (NVIDIA A100-SXM4-80GB) are passed over. Raises UsageError if unknown."""
    key = re.sub(r"[\s_]+", "-", _NUMBERED.sub(r"\1", name.strip().lower()))
    key = re.sub(
        r"\b(nvidia|geforce|tesla|rtx|intel|data-center-gpu|sxm\d?|hbm\w*)\b-?|^rtx(?=\d|a\d)|(?<=\d)gb\b", "", key
    ).rstrip("-")
    key = re.sub(r"^pro-6000\b.*", "6000-pro", key)
    key = re.sub(r"^(?:tpu-?)?v?(5e|5p|6e|7x)$", r"tpu-v\1", key)
    matches = [known for known in DEVICES if known == key or known.startswith(f"{key}-")]
    if matches:
        device = DEVICES[matches[-1]]
    elif (size := memory_in(name)) is not None:
        device = Device(f"device of {name.strip()}", size, {})
    else:
        families = (known.rpartition("-")[0] for known, device in DEVICES.items() if "-" in known and not device.is_tpu)
        alike = [known for known in (*DEVICES, *families) if known[0] == key[:1]]  # 2080ti is nothing like h200
        near = get_close_matches(key, alike, 1)
        hint = f"did you mean {near[0]}? If not," if near else f"use one of {', '.join(DEVICES)}, or"
        raise UsageError(f"--device: unknown (got {name!r}); {hint} give its memory: 80GiB.")
    return device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)


def memory_in(text: str) -> int | None:
    """The bytes of a device's memory, as 80GiB; None for other text, such as the GPU 2080 Ti, and for other sizes."""
    size = read_bytes(text)
    return None if size is None or size > LARGEST_BYTES else size


def of_hardware(name: str, memory_bytes: int | None) -> Device:
    """The device with this driver name ("NVIDIA H100 80GB HBM3"), with the memory that the driver shows, if it does."""
    words = set(re.split(r"[^a-z0-9]+", _NUMBERED.sub(r"\1", name.lower())))
    parts = {key: {part for part in key.split("-") if not part.isdigit() or part in words} for key in DEVICES}
    named = [key for key in DEVICES if parts[key] <= words and key.split("-")[0] in words]
    if not named or words & LESS:
        return Device(name, memory_bytes or None, {})
    most = max(len(parts[key]) for key in named)  # "H100 PCIe" is a board of its own beside "H100"
    found = [key for key in named if len(parts[key]) == most]
    closest = min(found, key=lambda key: abs((DEVICES[key].memory_bytes or 0) - (memory_bytes or 0)))
    return replace(DEVICES[closest], memory_bytes=memory_bytes or DEVICES[closest].memory_bytes)
