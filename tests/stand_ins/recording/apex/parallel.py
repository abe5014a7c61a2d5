from torch.nn.parallel import DistributedDataParallel  # noqa: F401, Apex's own needs CUDA
