"""A mistake for each target, which it must find: (file, what is there, what takes its place)."""

FAULTS = {
    "rendezvous": ("csrc/shm_rendezvous.c", "unsigned char difference = hello->number != own;", "unsigned char difference = 0;"),
    "guest": ("csrc/shm_rendezvous.c", "int fits = m->rank == *known && m->ranks && ", "int fits = m->rank == *known && "),
    "hub": ("csrc/hub_match.c", "if (meeting && meeting->part[index].here) {", "if (0) {"),
    "rank": ("csrc/hub_reader.c", "if (header->bytes > to->bytes - call->got_bytes)", "if (header->bytes > to->bytes)"),
    "handshake": ("zero_c/_handshake.py", "except (ValueError, RecursionError):", "except json.JSONDecodeError:"),
    "listener": ("zero_c/_hosts.py", "        except Wrong:\n            self._drop(guest)\n", ""),
    "environment": ("zero_c/_address.py", " or not 1 <= int(text) <= highest:", ":"),
    "manifest": ("zero_c/_loading.py", "and is_texts(tensor.get(\"roles\"))\n", "\n"),
    "tensors": ("zero_c/_blocks.py", "if any(not 8 + length <= first <= end <= size", "if any(not 8 + length <= first <= size"),
    "foreign": ("zero_c/convert/_allowed.py", "weights_only=True, **how", "weights_only=False, **how"),
    "plan": ("zero_c/plan.py", "except (TypeError, ValueError, OverflowError) as error:", "except (TypeError, ValueError) as error:"),
    "dlpack": ("csrc/py_dlpack.c", "|| __builtin_mul_overflow(without_zeros, elem_bytes, &bytes)", ""),
}
