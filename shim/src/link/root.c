/* root.c - the way to the arbiter's socket for a program that changes its root.
 *
 * After a chroot the socket's path is no longer valid, and the program could not connect to a restarted arbiter. The helper
 * thread keeps the root that it started with, where the kernel lets it (`unshare(CLONE_FS)`). Seccomp profiles of container runtimes forbid
 * that call, and a process may have no helper. There the folder of the socket is kept open, and the connection is made from inside it: by the
 * folder's name in /proc, which the new root may have, else by a thread that makes two system calls and ends. That one is cloned without
 * CLONE_FS, so it has a current folder of its own, and those profiles allow it: they forbid only new namespaces. It has the process's ID,
 * by which the arbiter identifies a connection.
 */
#include "process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static struct wire_end *const folder_ = &tangram.socket_folder;

static bool folder_of(const char *path, char *folder, size_t capacity)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL && snprintf(folder, capacity, "%.*s", slash == path ? 1 : (int)(slash - path), path) < (int)capacity;
}

void root_keep_folder(void)
{
    char folder[sizeof tangram.grant.socket];
    if (wire_is_there(folder_) || !folder_of(tangram.grant.socket, folder, sizeof folder))
        return;
    wire_own(folder_, open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC)); /* a child that is forked has it, too */
}

/* It prevents no unmount of the program's working folder. */
bool root_keep(void)
{
    if (unshare(CLONE_FS) != 0)
        return false;
    if (tangram.grant.socket[0] != '/' || chdir("/") != 0)
        debug("the library's thread keeps the program's folder");
    return true;
}

/* Is the folder where the program looks for it? Then there is no other way to try. */
static bool is_where_it_was(void)
{
    char folder[sizeof tangram.grant.socket];
    struct stat there;
    return folder_of(tangram.grant.socket, folder, sizeof folder) && stat(folder, &there) == 0 && there.st_dev == folder_->device &&
           there.st_ino == folder_->inode;
}

#define CONNECTS ((long)(CLONE_VM | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_VFORK))

/* The thread shares everything with its maker but the current folder, the stack too: so it runs in registers alone, and its maker stands still until
 * it has ended, as after vfork. Returns what connect returned; nothing where there is no thread. */
#if defined(__x86_64__)
static long connect_in(long folder, long fd, const struct sockaddr_un *address)
{
    volatile long answer = -1;
    register long where __asm__("r12") = folder;
    register long socket __asm__("r13") = fd;
    register const struct sockaddr_un *to __asm__("r14") = address;
    register volatile long *result __asm__("r15") = &answer;
    register long no_parent __asm__("r10") = 0;
    register long no_tls __asm__("r8") = 0;
    long made = SYS_clone;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 2f\n\t"
                     "mov %%r12, %%rdi\n\t"
                     "mov %[fchdir], %%eax\n\t"
                     "syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "mov %%r13, %%rdi\n\t"
                     "mov %%r14, %%rsi\n\t"
                     "mov %[bytes], %%edx\n\t"
                     "mov %[connect], %%eax\n\t"
                     "syscall\n"
                     "1:\n\t"
                     "mov %%rax, (%%r15)\n\t"
                     "xor %%edi, %%edi\n\t"
                     "mov %[exit], %%eax\n\t"
                     "syscall\n\t"
                     "ud2\n"
                     "2:"
                     : "+a"(made)
                     : "D"(CONNECTS), "S"(0L), "d"(0L), "r"(no_parent), "r"(no_tls), "r"(where), "r"(socket), "r"(to), "r"(result), [fchdir] "i"(SYS_fchdir),
                       [bytes] "i"(sizeof *to), [connect] "i"(SYS_connect), [exit] "i"(SYS_exit)
                     : "rcx", "r11", "memory", "cc");
    return answer;
}
#elif defined(__aarch64__)
/* The kernel keeps all registers but x0. That clone has its last two arguments the other way round here does not matter: both are 0. */
static long connect_in(long folder, long fd, const struct sockaddr_un *address)
{
    volatile long answer = -1;
    register long where __asm__("x19") = folder;
    register long socket __asm__("x20") = fd;
    register const struct sockaddr_un *to __asm__("x21") = address;
    register volatile long *result __asm__("x22") = &answer;
    register long number __asm__("x8") = SYS_clone;
    register long made __asm__("x0") = CONNECTS;
    register long no_stack __asm__("x1") = 0;
    register long no_parent __asm__("x2") = 0;
    register long no_tls __asm__("x3") = 0;
    register long no_child __asm__("x4") = 0;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 2f\n\t"
                     "mov x0, x19\n\t"
                     "mov x8, %[fchdir]\n\t"
                     "svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x0, x20\n\t"
                     "mov x1, x21\n\t"
                     "mov x2, %[bytes]\n\t"
                     "mov x8, %[connect]\n\t"
                     "svc #0\n"
                     "1:\n\t"
                     "str x0, [x22]\n\t"
                     "mov x0, #0\n\t"
                     "mov x8, %[exit]\n\t"
                     "svc #0\n\t"
                     "brk #1\n"
                     "2:"
                     : "+r"(made)
                     : "r"(number), "r"(no_stack), "r"(no_parent), "r"(no_tls), "r"(no_child), "r"(where), "r"(socket), "r"(to), "r"(result),
                       [fchdir] "i"(SYS_fchdir), [bytes] "i"(sizeof *to), [connect] "i"(SYS_connect), [exit] "i"(SYS_exit)
                     : "memory", "cc");
    return answer;
}
#else
#error "root.c: write the thread for this architecture"
#endif

bool root_stat(struct stat *there)
{
    const char *name = strrchr(tangram.grant.socket, '/');
    return name != NULL && wire_is_there(folder_) && fstatat(folder_->fd, name + 1, there, 0) == 0;
}

bool root_connect(int fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    sigset_t all, before;
    if (!wire_is_there(folder_) || is_where_it_was())
        return false;
    const char *name = strrchr(tangram.grant.socket, '/') + 1;
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", folder_->fd, name);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
        return true;
    snprintf(address.sun_path, sizeof address.sun_path, "%s", name);
    sigfillset(&all); /* a handler would run where there is no stack for it */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    long rc = connect_in(folder_->fd, fd, &address);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0;
}
