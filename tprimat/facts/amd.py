"""AMD's Instinct accelerators. fp32 is the rate of the matrix cores, which rocBLAS and hipBLASLt use for matmuls."""

from tprimat.facts.accelerator import GIBIBYTE, Accelerator, tera

CDNA2 = "AMD Instinct MI200 series data sheets (MI210, MI250, MI250X); AMD CDNA 2 white paper"
CDNA3 = "AMD Instinct {} data sheet; AMD CDNA 3 white paper"
CDNA4 = "AMD Instinct {} data sheet, 2025; AMD CDNA 4 white paper"

MI300X_PEAKS = tera(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9)
MI300X_SPARSE = tera(tf32=1307.4, fp16=2614.9, bf16=2614.9, fp8=5229.8)

AMD = (
    Accelerator(
        name="MI210",
        vendor="AMD",
        device_names=("AMD Instinct MI210",),
        dense_flops=tera(fp32=45.3, fp16=181, bf16=181),
        memory_bytes=64 * GIBIBYTE,
        bandwidth_bytes_per_second=1638.4e9,
        tdp_watts=300,
        link_bytes_per_second=300e9,
        source=CDNA2,
    ),
    # torch, and so every rank, sees each of the two dies (GCD) of an MI250 or MI250X as a device: these are halves.
    Accelerator(
        name="MI250 (one GCD)",
        vendor="AMD",
        device_names=("AMD Instinct MI250",),
        dense_flops=tera(fp32=45.25, fp16=181.05, bf16=181.05),
        memory_bytes=64 * GIBIBYTE,
        bandwidth_bytes_per_second=1638.4e9,
        tdp_watts=280,
        link_bytes_per_second=400e9,
        source=CDNA2,
    ),
    Accelerator(
        name="MI250X (one GCD)",
        vendor="AMD",
        device_names=("AMD Instinct MI250X",),
        dense_flops=tera(fp32=47.85, fp16=191.5, bf16=191.5),
        memory_bytes=64 * GIBIBYTE,
        bandwidth_bytes_per_second=1638.4e9,
        tdp_watts=280,
        link_bytes_per_second=400e9,
        source=CDNA2,
    ),
    Accelerator(
        name="MI300X",
        vendor="AMD",
        device_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI300X VF"),
        dense_flops=MI300X_PEAKS,
        sparse_flops=MI300X_SPARSE,
        memory_bytes=192 * GIBIBYTE,
        bandwidth_bytes_per_second=5.325e12,
        tdp_watts=750,
        link_bytes_per_second=896e9,
        source=CDNA3.format("MI300X"),
    ),
    Accelerator(
        name="MI300A",
        vendor="AMD",
        device_names=("AMD Instinct MI300A",),
        dense_flops=tera(fp32=122.6, tf32=490.3, fp16=980.6, bf16=980.6, fp8=1961.2),
        sparse_flops=tera(tf32=980.6, fp16=1961.2, bf16=1961.2, fp8=3922.3),
        memory_bytes=128 * GIBIBYTE,
        bandwidth_bytes_per_second=5.3e12,
        tdp_watts=760,
        # Three peers of a four-APU node, 256 GB/s (2 links) each.
        link_bytes_per_second=768e9,
        source=CDNA3.format("MI300A"),
    ),
    Accelerator(
        name="MI325X",
        vendor="AMD",
        device_names=("AMD Instinct MI325X", "AMD Instinct MI325X OAM", "AMD Instinct MI325X VF"),
        dense_flops=MI300X_PEAKS,
        sparse_flops=MI300X_SPARSE,
        memory_bytes=256 * GIBIBYTE,
        bandwidth_bytes_per_second=6.0e12,
        tdp_watts=1000,
        link_bytes_per_second=896e9,
        source=CDNA3.format("MI325X"),
    ),
    Accelerator(
        name="MI350X",
        vendor="AMD",
        device_names=("AMD Instinct MI350X", "AMD Instinct MI350X OAM", "AMD Instinct MI350X VF"),
        dense_flops=tera(fp32=144.2, fp16=2306.9, bf16=2306.9, fp8=4613.7),
        sparse_flops=tera(fp16=4613.7, bf16=4613.7, fp8=9227.5),
        memory_bytes=288 * GIBIBYTE,
        bandwidth_bytes_per_second=8.0e12,
        tdp_watts=1000,
        link_bytes_per_second=1075.2e9,
        source=CDNA4.format("MI350X"),
    ),
    Accelerator(
        name="MI355X",
        vendor="AMD",
        device_names=("AMD Instinct MI355X", "AMD Instinct MI355X OAM", "AMD Instinct MI355X VF"),
        dense_flops=tera(fp32=157.3, fp16=2516.6, bf16=2516.6, fp8=5033.2),
        sparse_flops=tera(fp16=5033.2, bf16=5033.2, fp8=10066.3),
        memory_bytes=288 * GIBIBYTE,
        bandwidth_bytes_per_second=8.0e12,
        tdp_watts=1400,
        link_bytes_per_second=1075.2e9,
        source=CDNA4.format("MI355X"),
    ),
)
