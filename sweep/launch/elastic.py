"""`python -m sweep.launch.elastic ...`: torch.distributed.run that ends with the process that started it."""

from torch.distributed.run import main

from sweep.launch.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
