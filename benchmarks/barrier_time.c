/*
 * Seconds per barrier of a group of processes on the allowed cores, with 2
 * ranks and with 8.
 *
 *     barrier_time [loops]  ->  {"2": seconds, "8": seconds}
 */
#include "pair.h"

#include "zero_c.h"

#define ROUNDS 7

static int loops = 20000, ranks;

static int rank_main(void)
{
    char job[64];
    snprintf(job, sizeof job, "barrier-%d-%d", (int)getppid(), ranks);
    zc_comm_config where = {
        .rank = (size_t)pair_rank, .ranks = (size_t)ranks, .job = job, .start_timeout_s = 60, .timeout_s = 60};
    zc_comm *comm;
    int count = ranks == 2 ? loops : loops / 20 + 1;

    if (zc_comm_open(&where, &comm) != ZC_OK) {
        fprintf(stderr, "rank %d: %s\n", pair_rank, zc_last_error());
        return 2;
    }
    for (int round = 0; round < ROUNDS; round++) {
        zc_comm_barrier(comm);
        double begin = now_s();
        for (int i = 0; i < count; i++)
            if (zc_comm_barrier(comm) != ZC_OK) {
                fprintf(stderr, "rank %d: %s\n", pair_rank, zc_last_error());
                return 2;
            }
        pair->seconds[pair_rank][round] = (now_s() - begin) / count;
    }
    zc_comm_close(comm);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        loops = atoi(argv[1]);
    printf("{");
    for (ranks = 2; ranks <= 8; ranks += 6) {
        int worst = pair_fork(ranks, rank_main);
        if (worst)
            return worst;
        printf("%s\"%d\": %.3e", ranks == 2 ? "" : ", ", ranks, pair_median(0, 1, ROUNDS));
        fflush(stdout);
    }
    printf("}\n");
    return 0;
}
