"""GPU time of the containers of a node. `vgpu.gputime` is the policy; the modules here apply it.

decide, call nothing        container, containers, process, obstacles, stray_channels, suspend_evidence, suspend_plan, usage_report,
                            verdicts, watchdog
call the driver             channels: the suspend and the resume; suspend_trial, in a process of its own
read sockets, files, NVML   suspend_thread, which also orders the switches of its GPU; trials_file, usage_check
start and end threads       suspend_threads; timer and warm_up keep their delays short
connect the others          node_scheduler, under its lock; suspend_host is its interface for a thread
report                      counters, log_messages, metrics
"""
