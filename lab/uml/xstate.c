// Preloaded into the guest's kernel. On a processor with AMX the host's saved register state is longer (11 KiB) than a 6.1
// guest knows (2,696 bytes), and PTRACE_SETREGSET takes all of it or nothing: "ptrace set fp regs failed, errno = 14".
// This hands the host the length it wants; what the guest does not know of (the tiles) is left in its initial state.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

#define HEADER 512 // where the word lies that says which parts of the state are not initial
#define TILES (3ull << 17)

static long (*host)(enum __ptrace_request, ...);
static char whole[64 << 10] __attribute__((aligned(64)));
static size_t length; // of the host's state; 0: not known yet

// Before the guest's kernel takes the process over: later nothing may be looked up or allocated.
__attribute__((constructor)) static void find(void) { host = dlsym(RTLD_NEXT, "ptrace"); }

static long set(pid_t pid, void *note, const struct iovec *guest) {
  if (!length) {
    struct iovec all = {whole, sizeof whole};
    if (host(PTRACE_GETREGSET, pid, note, &all) < 0) return -1;
    length = all.iov_len;
  }
  if (guest->iov_len >= length) return host(PTRACE_SETREGSET, pid, note, guest);
  if (guest->iov_len < HEADER + 8) { errno = EFAULT; return -1; }
  memcpy(whole, guest->iov_base, guest->iov_len);
  memset(whole + guest->iov_len, 0, length - guest->iov_len);
  uint64_t parts;
  memcpy(&parts, whole + HEADER, sizeof parts);
  parts &= ~TILES;
  memcpy(whole + HEADER, &parts, sizeof parts);
  struct iovec all = {whole, length};
  return host(PTRACE_SETREGSET, pid, note, &all);
}

long ptrace(enum __ptrace_request request, ...) {
  va_list rest;
  va_start(rest, request);
  pid_t pid = va_arg(rest, pid_t);
  void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
  va_end(rest);
  if (request == PTRACE_SETREGSET && (uintptr_t)address == NT_X86_XSTATE) return set(pid, address, data);
  return host(request, pid, address, data);
}
