"""Preemption: which pods are evicted for a pod of higher priority, and what is reserved for it meanwhile.

    verb                     /preempt: kube-scheduler proposes victims, the answer corrects them
    preempt_call             chooses the victims of one /preempt call
    planner                  chooses the victims where kube-scheduler does not call
    evictor                  carries a plan out: reserves, nominates, evicts one by one
    evictions                the API writes of an eviction, and its Events
    preemption_reservations  GPU capacity for the preemptor while its victims end
    coordinator              assembles these parts, and passes on what the watch shows

    victim_candidates        the pods of a node, and which of them may be evicted
    disruption_budgets       PodDisruptionBudgets
    history, history_store   pods that were preempted often are not evicted; stored in a ConfigMap
    kueue_pods, kueue_workloads, owners    pods that Kueue admitted as part of a Workload
    kueue_victims            Workloads that may be evicted as a whole
    background               long searches, a little at a time

A victim has a lower priority than the preemptor: this alone decides where a latency-critical pod may evict. All rules of which pod may evict which are in
`vgpu.scheduling.victims.eligibility`. The service class only orders the victims: best-effort pods are evicted first.
"""
