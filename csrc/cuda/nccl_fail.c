/*
 * What a rank with a GPU says when something fails, and how the others get to
 * hear it.
 */
#include "nccl_state.h"

#include <stdio.h>
#include <string.h>

#define HEAR_NS 1000000000ull   /* for the host's plane to say what NCCL met only the effect of */

zc_status nccl_give_up(nccl_comm *comm, zc_status status, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", why); /* may be the last sentence, which the next lines replace */
    comm_poison(comm->host, status, text);
    nccl_abort(comm);
    zc_status first = comm_watch(comm->host, "a failed group");
    return first != ZC_OK ? first : zc_fail(status, "%s", text);
}

/*
 * Declarations and bad news travel, and NCCL may be faster.  If ranks differ, that is known once every rank's declaration
 * of what this lane has posted has arrived; if one is gone, as soon as its end is seen.
 */
static void hear_the_reason(nccl_comm *comm, int lane, ncclResult_t result)
{
    char list[256];
    uint64_t until_ns = nccl_now_ns() + HEAR_NS;
    int of_a_peer = result == ncclRemoteError || result == ncclSystemError; /* what NCCL says when one is gone */
    while (comm_watch(comm->host, "a failed operation") == ZC_OK && nccl_now_ns() < until_ns &&
           (of_a_peer || nccl_missing(comm, lane, comm->lane[lane].posted, list, sizeof list)))
        nccl_pause();
}

zc_status nccl_broken(nccl_comm *comm, int lane, ncclResult_t result, const char *what)
{
    char why[900];
    const char *last = comm->api->GetLastError(comm->lane[lane].nccl);
    int same_gpu = last && strstr(last, "Duplicate GPU");
    const char *advice = same_gpu ? "; give every rank a GPU of its own (two on one need NCCL 2.30 with "
                                    "NCCL_MULTI_RANK_GPU_ENABLE=1)" : "";
    snprintf(why, sizeof why, "rank %zu: NCCL %d.%d.%d failed in %s on GPU %d: %s%s%.500s%s", comm->name,
             comm->api->version / 10000, comm->api->version / 100 % 100, comm->api->version % 100, what, comm->ordinal,
             comm->api->GetErrorString(result), last && *last ? ": " : "", last ? last : "", advice);
    hear_the_reason(comm, lane, result);
    return nccl_give_up(comm, ZC_ECOMM, why);
}

zc_status nccl_time_out(nccl_comm *comm, int lane, uint64_t number, const char *what, uint64_t spent_ns)
{
    char list[256], stopped[128], why[640];
    size_t missing = nccl_missing(comm, lane, number, list, sizeof list);
    int used = snprintf(why, sizeof why, "rank %zu waited %.1f s for %s (operation %llu) on GPU %d; ", comm->name,
                        (double)spent_ns * 1e-9, what, (unsigned long long)number, comm->ordinal);
    if (missing)
        snprintf(why + used, sizeof why - (size_t)used, "not called by rank%s %s; all ranks must make this call, or "
                 "the timeout is too short", missing > 1 ? "s" : "", list);
    else if (comm_stopped(comm->host, stopped, sizeof stopped))
        snprintf(why + used, sizeof why - (size_t)used, "every rank called it; " COMM_STOPPED, stopped);
    else
        snprintf(why + used, sizeof why - (size_t)used, "every rank called it: a GPU or the network is stuck "
                 "(NCCL_DEBUG=INFO says more), or the work before it takes longer than the timeout");
    return nccl_give_up(comm, ZC_ETIMEOUT, why);
}

zc_status nccl_interrupt(nccl_comm *comm, const char *what)
{
    char why[128];
    snprintf(why, sizeof why, "rank %zu was interrupted in %s", comm->name, what);
    nccl_give_up(comm, ZC_EINTERRUPT, why);
    return zc_fail(ZC_EINTERRUPT, "%s", why);
}

zc_status nccl_settle(nccl_comm *comm, int number, ncclResult_t result, const char *what)
{
    nccl_lane *lane = &comm->lane[number];
    uint64_t start_ns = nccl_now_ns();
    while (result == ncclInProgress) {
        ncclResult_t asked = comm->api->CommGetAsyncError(lane->nccl, &result);
        if (asked != ncclSuccess)
            result = asked;
        if (result != ncclInProgress)
            break;
        zc_status status = comm_watch(comm->host, what);
        if (status != ZC_OK) {
            nccl_abort(comm);
            return status;
        }
        if (comm->public.interrupted && comm->public.interrupted(comm->public.interrupt_context))
            return nccl_interrupt(comm, what);
        uint64_t spent_ns = nccl_now_ns() - start_ns;
        if (spent_ns >= comm->public.timeout_ns)
            return nccl_time_out(comm, number, lane->posted, what, spent_ns);
        nccl_pause();
    }
    return result == ncclSuccess ? ZC_OK : nccl_broken(comm, number, result, what);
}

zc_status nccl_agree(nccl_comm *comm, comm_channel *host, uint32_t tag, const char *what, zc_status status)
{
    struct vote {
        uint64_t name;
        int32_t status;
        char text[500];
    } own = {.name = comm->name, .status = status}, *all;
    size_t ranks = host->comm->ranks, failed = ranks;
    if (status != ZC_OK)
        snprintf(own.text, sizeof own.text, "%s", zc_last_error());
    all = zc_malloc(ranks * sizeof *all);
    zc_status met = all ? comm_exchange(host, tag, what, &own, all, sizeof own)
                        : zc_fail(ZC_ENOMEM, "no memory for the answers of %zu ranks", ranks);
    if (!all)
        comm_poison(host->comm, ZC_ENOMEM, zc_last_error()); /* the peers wait for an answer */
    for (size_t q = 0; met == ZC_OK && q < ranks && failed == ranks; q++)
        if (all[q].status != ZC_OK)
            failed = q;
    if (status != ZC_OK)
        zc_fail(status, "%s", own.text);
    else if (met != ZC_OK)
        status = met;
    else if (failed < ranks)
        status = zc_fail((zc_status)all[failed].status, "rank %llu could not do its part of '%s': %s",
                         (unsigned long long)all[failed].name, what, all[failed].text);
    zc_free(all);
    return status;
}
