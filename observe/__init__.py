"""What all programs of Tangram have in common as programs: how they are set, what they tell of themselves, and how they end.

    program   from settings to the exit status
    options   settings from flags and environment variables, with one sentence for each that is wrong
    log       lines of JSON on standard error
    pages     /metrics, /healthz and /readyz, whatever serves them
    serving   two HTTP servers in one event loop, over uvicorn
    signals   SIGTERM and SIGINT in an event loop

It decides nothing about GPUs or pods and knows neither Kubernetes nor NVML.
"""
