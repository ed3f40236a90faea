/*
 * Control of the emulated CUDA runtime: what a test may set, and what it may ask.
 *
 * A test calls emu_reset with a seed, runs the code under test, and requires
 * emu_findings to be 0.  Everything that was created before a reset is void
 * after it; no other thread may be inside the runtime at that moment.  Settings
 * (protection, devices, attributes, versions, the dropped wait) and the list of
 * wait sites stay over resets, faults do not.
 *
 * Functions that write text write lines, as many as fit, and return how many
 * there are; `text` may be NULL.
 */
#ifndef EMU_H
#define EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A new machine whose schedule follows from `seed`.  After each enqueue up to
 * `eager` operations are run, all that can if it is negative; the others wait
 * until a host thread blocks or asks.  With `check` accesses are checked to be
 * ordered.  A host thread that waits longer than EMU_DEADLOCK seconds (from the
 * environment; 20) without anything happening anywhere is a finding, and every
 * call fails from then on.
 */
void emu_reset(uint64_t seed, int eager, int check);

/* Device memory has no access outside operations: host code that touches it dies by SIGSEGV. */
void emu_protect(int on);

void emu_set_devices(int count);                      /* 8 at first */
void emu_set_attribute(int attribute, int value);     /* a CUdevice_attribute of all devices */
void emu_driver_version(int version);                 /* 13000 at first; below 13000 only version queries work */
void emu_no_driver(int on);
void emu_nccl_version(int version);                   /* what ncclGetVersion says; 22809 at first */

/* The nth call from now (1: the next) of a CUDA, driver or NCCL function fails; launches are "cudaLaunchKernel". */
void emu_fail_next(const char *function, int nth, int error);
/* How many of those have not happened. */
int emu_faults_left(void);

int emu_findings(char *text, size_t bytes);
/* What is still allocated, mapped, reserved or open. */
int emu_leaks(char *text, size_t bytes);

/* Whether any thread has made a context on the device: memory that nobody who does not use it wants to miss. */
int emu_has_context(int device);

/* Lines "file.c:12 cudaStreamWaitEvent": the places of waits of streams for events and of the host for any of them. */
int emu_wait_sites(char *text, size_t bytes);
/*
 * Waits at this place ("file.c:12", or a line of the list) do nothing; NULL: all do what they should.  At first it is
 * the place that the environment's EMU_DROP_WAIT names; the list is appended to the file EMU_WAIT_SITES at exit.
 */
void emu_drop_wait(const char *site);

/*
 * In a build that watches kernels (emu_watch.cc): ranges declared with CU_MAY_READ or CU_MAY_WRITE of which no launch
 * of this process has touched the first or the last byte.  Ranges that a kernel does not keep to are findings.
 */
int emu_unreached(char *text, size_t bytes);

uint64_t emu_operations(void); /* run since the reset */
uint64_t emu_copied(int to_device, int from_device); /* bytes, by cudaMemcpyAsync, from and to device or host memory */
uint64_t emu_trace_hash(void); /* of their order */

/* Copies after all enqueued work, whatever is protected; the checker does not see it. */
void emu_peek(void *to, const void *device_from, size_t bytes);
void emu_poke(void *device_to, const void *from, size_t bytes);

/*
 * NCCL's ranks are processes, one each, from the next id on: emu_nccl_shared.cc.  At first it is so where the
 * environment says EMU_NCCL_PROCESSES=1.
 */
void emu_nccl_processes(int on);
/*
 * The nth NCCL operation from now that rank `rank` of a communicator issues never
 * runs, and ncclCommGetAsyncError gives `result` there from then on; for
 * its peers the operation just does not come.
 */
void emu_nccl_fail(int rank, int nth_operation, int result);
/* The emulated NCCL's functions by name, as dlsym would find them; NULL: no such. */
void *emu_nccl_symbol(const char *name);

#ifdef __cplusplus
}
#endif

#endif
