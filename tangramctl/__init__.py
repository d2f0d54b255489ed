"""tangramctl: a share of a GPU for a command on any Linux machine, with no cluster, and a view of the memory and GPU time of each process.

The same library, the same arbiter and the same placement as on a cluster; the record of runs differs. Each machine (each user that
is not root) has one state root with a directory for each run, and the run itself becomes the command (`exec`): nothing stands
between a shell and the program it started.

    errors    exit codes                     machine   paths and locks of one state root
    request   options to a request           gpus      what NVML reports
    choose    which GPU                      records   which runs there are
    keeper    the daemon that keeps the arbiter running as long as there are runs
    service   starting, finding and stopping it
    run, ps   the two commands
"""
