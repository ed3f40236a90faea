/*
 * Faults, by injection: what the walker (walk.c) and its ranks (rank.c) tell each other.
 *
 * The walker starts the ranks of a run as processes.  They share one page range with
 * it, the script: it says what the ranks do, which of them meets its end where, and
 * has room for what each saw.  The places are those of zc_point.h, and those between
 * the calls of the rank's own program.  A place is a point's name and the how-manieth
 * time that this rank comes to it, so it is the same place in every run.
 */
#ifndef FAULTS_H
#define FAULTS_H

#include "together.h"

#define MOST_RANKS 4
#define MOST_POINTS 6000 /* that one rank comes to in one run */
#define POINT_BYTES 40
#define SCRIPT_FD 3      /* of the script, in a rank */
#define HUB_FD 10        /* with a hub: of rank 0's socket to rank r, HUB_FD + r; of a rank's own one, HUB_FD */

#define EXIT_FAILED 3    /* a rank whose call failed, after it has closed everything */
#define EXIT_COMPLAINS 4 /* it has closed everything, and something was wrong on its GPU */
#define EXIT_SUDDEN 7    /* a rank that exits in the middle of a call */

typedef enum manner {
    NO_FAULT,
    KILLED,     /* SIGKILL */
    STOPPED,    /* SIGSTOP */
    EXITED,     /* exit() in the middle of a call */
    NO_MEMORY,  /* an allocation or a system call of the core fails; then the rank closes everything and ends */
    GAVE_UP     /* an error of the rank's own program between two calls; then the same */
} manner;

typedef struct fault {
    size_t rank;
    manner how;
    char point[POINT_BYTES]; /* "" with NO_MEMORY, where `time` counts allocations and system calls */
    long time;
} fault;

typedef struct rank_report {
    uint64_t fault_ns;       /* when it met its end; 0: it did not */
    uint64_t end_ns;         /* when its call failed */
    int status;              /* ZC_OK: no call failed */
    int opened;              /* it has a communicator */
    int closed;              /* it has closed everything, and looked at what is left */
    size_t descriptors_left, mappings_left;
    long questions;          /* allocations and system calls that could have failed */
    uint64_t digest;         /* of the parameters at the end */
    char text[1024];
    char complaints[1024];
    size_t points;
    char point[MOST_POINTS][POINT_BYTES]; /* where it came by, if the script asks for it */
} rank_report;

typedef struct script {
    size_t ranks;
    int stage, shared, overlap;
    int start_only;          /* meet and part: what comes before there is an engine */
    int hub;                 /* ranks as on several hosts: a communicator over sockets, and what goes over it; no engine */
    int list;
    uint64_t steps;          /* the run ends after so many */
    int closer;              /* the rank that closes while the others go on; -1: they part together */
    fault faults[2];
    double timeout_s, start_timeout_s;
    char job[64];
    char folder[200];        /* of the checkpoint */
    rank_report report[MOST_RANKS];
} script;

/*
 * The steps of the runs: the first makes the checkpoint with which all others begin; in
 * the second, or in the saving of what it made, a rank meets its end; the third belongs
 * to the run that goes on.
 */
enum { FIRST_STEP = 1, FAULTY_STEP = 2, LAST_STEP = 3 };

int rank_main(size_t rank);

#endif
