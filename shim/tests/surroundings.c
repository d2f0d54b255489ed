/* surroundings.c - processes that have little: no standard files, no descriptors left, no right to a socket. Prints codes, one line.
 *
 * CASE        what happens, in a container of 1000 MiB
 * closed F    with 0, 1 and 2 closed takes 10 MiB and waits for the library's two connections; writes to file F the code, how many
 *             of 0, 1 and 2 go to the arbiter, and how many others do
 * reused F  2 is closed and file F gets that number; then as "sandbox early", whose warning must not come into F
 * full        after CUDA is up no descriptor is left: takes 10 MiB, then again with descriptors
 * sandbox W   seccomp allows the library no socket, from before or after CUDA is up (W = early, late): takes 10 MiB twice
 * secure      the code of 2000 MiB and whether the library is in the process: for a program that the loader distrusts
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "gpu.h"

static bool goes_to_arbiter(int fd)
{
    struct sockaddr_un peer = {.sun_family = AF_UNSPEC};
    socklen_t length = sizeof peer - 1;
    return getpeername(fd, (struct sockaddr *)&peer, &length) == 0 && strstr(peer.sun_path, "arbiter.sock") != NULL;
}

static int connections(int first, int last)
{
    int count = 0;
    for (int fd = first; fd <= last; fd++)
        count += goes_to_arbiter(fd);
    return count;
}

static int closed(const char *path)
{
    for (int fd = 0; fd <= 2; fd++)
        close(fd);
    int code = gpu_hold(10);
    for (int ms = 0; ms < 10000 && connections(0, 63) < 2; ms++) /* the second is made by the library's thread, once there are channels */
        usleep(1000);
    int standard = connections(0, 2), others = connections(3, 63);
    int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    return dprintf(out, "%d %d %d\n", code, standard, others) > 0 ? 0 : 1;
}

static void full(void)
{
    struct rlimit before, none;
    int up = (int)gpu_begin();
    getrlimit(RLIMIT_NOFILE, &before);
    int next = dup(STDOUT_FILENO); /* the lowest that is free: none from there on */
    close(next);
    none = before;
    none.rlim_cur = (rlim_t)next;
    setrlimit(RLIMIT_NOFILE, &none);
    int without = (int)gpu_take(10);
    setrlimit(RLIMIT_NOFILE, &before);
    printf("%d %d %d\n", up, without, (int)gpu_take(10));
}

/* The library's sockets do not block, the fake driver's do: so only ours are forbidden. */
static int no_sockets(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, SOCK_NONBLOCK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static int reused(const char *path)
{
    close(STDERR_FILENO);
    if (open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644) != STDERR_FILENO)
        return 1;
    int filtered = no_sockets();
    printf("%d %d\n", filtered, (int)gpu_begin());
    return 0;
}

static void sandbox(bool early)
{
    int filtered = early ? no_sockets() : 0, up = (int)gpu_begin();
    if (!early)
        filtered = no_sockets();
    int first = (int)gpu_take(10), second = (int)gpu_take(10);
    printf("%d %d %d %d\n", filtered, up, first, second);
}

static int library_is_here(void)
{
    char line[512];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        found |= strstr(line, "libtangram.so") != NULL;
    if (maps != NULL)
        fclose(maps);
    return found;
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    take_routes();
    if (strcmp(what, "closed") == 0 && count > 2)
        return closed(words[2]);
    if (strcmp(what, "reused") == 0 && count > 2)
        return reused(words[2]);
    if (strcmp(what, "full") == 0)
        full();
    else if (strcmp(what, "sandbox") == 0 && count > 2)
        sandbox(strcmp(words[2], "early") == 0);
    else if (strcmp(what, "secure") == 0)
        printf("%d %d\n", gpu_hold(2000), library_is_here());
    else
        return 64;
    return 0;
}
