"""A DataLoader whose workers come from a fork server and use the GPU: they share the container's limit with their parent."""

from __future__ import annotations

import report
from report import LIMIT_MIB, MIB

try:
    import torch
    from torch.utils.data import DataLoader, Dataset
except ImportError as error:
    report.absent(str(error))


class OnHost(Dataset):  # type: ignore[type-arg, misc]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), float(index))


class OnGpu(OnHost):
    """Each worker requests more than is left; 1 when it was refused by PyTorch's own error, and saw the right limit."""

    def __getitem__(self, index: int) -> torch.Tensor:
        right = torch.cuda.mem_get_info()[1] == LIMIT_MIB * MIB
        try:
            torch.empty(6144 * MIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return torch.tensor(1.0 if right else -1.0)
        return torch.tensor(0.0)


def main() -> None:
    held = torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda").fill_(1)
    loader = DataLoader(OnHost(), batch_size=16, num_workers=2, multiprocessing_context="forkserver", pin_memory=True)
    total = sum(float(batch.cuda(non_blocking=True)[:, 0].sum().item()) for batch in loader)
    report.check("sum over batches of two workers", float(sum(range(64))), total)
    refused = DataLoader(OnGpu(), batch_size=1, num_workers=1, multiprocessing_context="forkserver")
    first = next(iter(refused))
    report.check("a worker requesting 6144 MiB beside 4096 held", 1.0, float(first.item()))
    del held
    torch.cuda.empty_cache()
    report.check("the parent after that", 4096 * MIB, torch.ones(4096 * MIB, dtype=torch.uint8, device="cuda").numel())


if __name__ == "__main__":
    main()
