"""For all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
