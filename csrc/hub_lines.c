/*
 * Declarations: what ranks do in one order, compared as it comes.
 *
 * Of each line the hub keeps the last entries that some member has still to pass,
 * LINE_ENTRIES at the most, and of each member how many it has declared and a
 * number that stands for all of them.  A member that is further behind than that
 * is compared by this number, once it comes to what is kept: so no difference is
 * missed, but the sentence may name a later pair.
 */
#include "hub_server.h"
#include "zc_hash.h"

#include <stdio.h>
#include <string.h>

#define LINE_ENTRIES 4096u
#define LINE_ENTRIES_FIRST 16u

_Static_assert(LINE_ENTRIES >= COMM_DECLARED, "what comm.h promises");

zc_status hub_line_init(hub_line *line, size_t ranks)
{
    line->count = zc_calloc(ranks, sizeof *line->count);
    line->chain = zc_calloc(ranks, sizeof *line->chain);
    return line->count && line->chain ? ZC_OK : ZC_ENOMEM;
}

void hub_line_clear(hub_line *line)
{
    zc_free(line->entry);
    zc_free(line->count);
    zc_free(line->chain);
    memset(line, 0, sizeof *line);
}

/* Entries that all members have passed are of no use any more. */
static void forget_passed(hub_line *line, size_t ranks)
{
    uint64_t least = line->count[0];
    for (size_t m = 1; m < ranks; m++)
        least = line->count[m] < least ? line->count[m] : least;
    if (line->last - least < line->kept)
        line->kept = (size_t)(line->last - least);
}

/* Room for one more; with no memory for it the oldest goes. */
static int make_room(hub_line *line)
{
    if (line->kept < line->room)
        return 1;
    size_t room = line->room ? 2 * line->room : LINE_ENTRIES_FIRST;
    hub_declared *entry = room <= LINE_ENTRIES ? zc_malloc(room * sizeof *entry) : NULL;
    if (entry) {
        for (uint64_t k = line->last; k > line->last - line->kept; k--)
            entry[k % room] = line->entry[k % line->room];
        zc_free(line->entry);
        line->entry = entry;
        line->room = room;
    } else if (line->kept) {
        line->kept--;
    }
    return line->room != 0;
}

static void differ(hub_server *server, hub_circle *circle, const hub_declared *entry, size_t index, uint64_t number,
                   uint64_t detail, const char *what)
{
    hub_circle_fail(server, circle, server->ranks, ZC_EMISMATCH, "rank %u did '%s' and rank %u did '%s' as number %llu "
                    "of what all ranks must do in one order%s", entry->rank, entry->what, circle->member[index], what,
                    (unsigned long long)number, entry->detail == detail ? "; what they did before that differed" : "");
}

void hub_line_declare(hub_server *server, hub_circle *circle, size_t index, const hub_header *header, const char *what)
{
    hub_line *line = &circle->line[header->tag];
    uint64_t detail = header->count, number = ++line->count[index];
    uint64_t chain = line->chain[index] = zc_hash_next(line->chain[index], detail);
    if (number <= line->last) {
        if (number > line->last - line->kept) {
            const hub_declared *entry = &line->entry[number % line->room];
            if (entry->chain != chain) {
                differ(server, circle, entry, index, number, detail, what);
                return;
            }
        }
        if (number == line->last - line->kept + 1)
            forget_passed(line, circle->ranks);
        return;
    }
    if (!make_room(line)) {
        hub_circle_fail(server, circle, server->ranks, ZC_ENOMEM, "rank 0 has no memory for what ranks declare");
        return;
    }
    line->last = number;
    line->kept++;
    hub_declared *entry = &line->entry[number % line->room];
    *entry = (hub_declared){.detail = detail, .chain = chain, .rank = circle->member[index]};
    snprintf(entry->what, sizeof entry->what, "%s", what);
    if (circle->ranks == 1)
        line->kept = 0;
}

void hub_line_behind(hub_server *server, hub_circle *circle, size_t index, const hub_header *header)
{
    const hub_line *line = &circle->line[header->tag];
    char text[HUB_TEXT_BYTES] = "";
    size_t behind = 0;
    for (size_t m = 0; m < circle->ranks; m++) {
        if (line->count[m] >= header->number)
            continue;
        behind++;
        zc_list_number(text, sizeof text, circle->member[m]);
    }
    hub_header answer = {.kind = HUB_ANSWER, .group = circle->id, .call = header->call, .count = behind,
                         .bytes = (uint32_t)strlen(text)};
    hub_tell(server, circle->member[index], &answer, text, NULL, 0);
}
