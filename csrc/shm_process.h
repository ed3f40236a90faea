/*
 * The processes of ranks: a descriptor stands for one (pidfd), also in other processes, and for no other that may get its
 * number later.
 */
#ifndef SHM_PROCESS_H
#define SHM_PROCESS_H

/* pidfd of the calling process, -1 with errno. */
int shm_process_open(void);
/* 1: the process of a pidfd has ended. */
int shm_process_ended(int process_fd);
/* 1: it is stopped, by a signal or a debugger; 0: not, or nobody knows. */
int shm_process_stopped(int process_fd);

#endif
