"""tangramctl: a share of a GPU for a command on any Linux machine, with no cluster, and a look at which process has what.

The same library, the same arbiter and the same placement as on a cluster; what differs is the book. Each machine (each user, who
is not root) has one state root with a directory for each run, and the run itself becomes the command (`exec`): nothing stands
between a shell and the program it started.

    errors    exit codes                     machine   paths and locks of one state root
    request   options to a request           GPUs     what NVML says
    choose    which GPU                     book      which runs there are
    keeper    the daemon that keeps the arbiter running as long as there are runs
    service   starting, finding and stopping it
    run, ps   the two commands
"""
