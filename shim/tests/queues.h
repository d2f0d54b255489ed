/* queues.h - a double of libcuda of which only queues are known. Context n is handle n + 1 << 12; its streams' handles are a little more. */
#ifndef TANGRAM_QUEUES_H
#define TANGRAM_QUEUES_H

#include "../src/process.h"

enum { CONTEXTS = 3, OWN_STREAMS = 2, QUEUES = 2 + OWN_STREAMS }; /* legacy, per-thread, made */
extern bool queued[CONTEXTS][QUEUES];
extern int current; /* context */

void queues_begin(int contexts);
void queues_end(void);
CUcontext handle_of(int context);
CUstream stream_of(int context, int made);
bool *queue_of(CUstream stream);
CUresult get_current(CUcontext *context);
CUresult not_capturing(CUstream stream, CUstreamCaptureStatus *status);
void another_comes(int context);
void read_all_that_was_reported(void);

void launch(int context, CUstream stream, int ptds);
void wait_for(int context, CUstream stream, int ptds);
void wait_for_context(int context);
void look(void); /* as the helper does, until it queries the driver */

#endif
