/* The init of a live container: starts processes at the owner's request, and collects ended ones. Ends with its socket.
 *
 * init.py executes it once the container is made and confined, if init_binary.py could compile it; else init.py continues
 * itself and does the same. A fork of Python costs 1.4 MB of memory per container, this less than a tenth.
 *
 * init PTS: descriptor 3 is the socket to the owner, PTS one of /dev/pts. A message is its length in 4 bytes (big endian)
 * and that many bytes, with descriptors; see ipc.py. The only request is that of ipc.pack_spawn. The answer is "ready"
 * with a pidfd and the master side of the terminal, if one was requested, or "error NUMBER PATH\0TEXT".
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { CHANNEL = 3, MOST = 16, LARGEST = 1 << 30, COLUMNS = 200, ROWS = 50 };

static int pts;

/* Where the exit status of a started process goes. */
static struct started { pid_t pid; int report; } *table;
static size_t entries;

static void must(int good) { if (!good) _exit(1); }

static void receive(char *to, size_t size, int *descriptors, int *number) {
    char room[CMSG_SPACE(MOST * sizeof(int))];
    while (size) {
        struct iovec part = {to, size};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        ssize_t got = recvmsg(CHANNEL, &message, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        must(got > 0);
        for (struct cmsghdr *one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
            int count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            must(*number + count <= MOST);
            memcpy(descriptors + *number, CMSG_DATA(one), count * sizeof(int));
            *number += count;
        }
        to += got;
        size -= got;
    }
}

static void answer(const char *text, size_t size, const int *descriptors, int number) {
    unsigned char head[4] = {size >> 24, size >> 16, size >> 8, size};
    char room[CMSG_SPACE(MOST * sizeof(int))] = {0};
    struct iovec parts[2] = {{head, 4}, {(char *)text, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (number) {
        message.msg_control = room;
        message.msg_controllen = CMSG_SPACE(number * sizeof(int));
        struct cmsghdr *one = CMSG_FIRSTHDR(&message);
        *one = (struct cmsghdr){CMSG_LEN(number * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(one), descriptors, number * sizeof(int));
    }
    must(sendmsg(CHANNEL, &message, MSG_NOSIGNAL) == (ssize_t)(4 + size)); /* an answer is far smaller than its buffer */
}

static void refuse(int code, const char *path, const char *text) {
    char *said;
    int size = asprintf(&said, "error %d %s%c%s", code ? code : EIO, path, 0, text);
    must(size >= 0);
    answer(said, size, NULL, 0);
    free(said);
}

/* Kill what is left of a session. */
static void end_session(pid_t leader) {
    DIR *folder = opendir("/proc");
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        pid_t pid = atoi(entry->d_name);
        if (pid > 0 && getsid(pid) == leader) kill(pid, SIGKILL);
    }
    closedir(folder);
}

/* Collect what ended; the rest of a started process's session ends with it. */
static void collect(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (size_t at = 0; at < entries; at++)
            if (table[at].pid == pid) {
                char code[16];
                int report = table[at].report;
                table[at] = table[--entries];
                end_session(pid);
                int size = sprintf(code, "%d", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
                while (write(report, code, size) < 0 && errno == EINTR) {} /* perhaps nobody wants to know any more */
                close(report);
                break;
            }
}

/* The program that a shell would run, or NULL. */
static char *find(const char *name, const char *path, const char *cwd) {
    char *found;
    if (strchr(name, '/')) return strdup(name);
    for (const char *end = path;; path = end + 1) {
        end = strchrnul(path, ':');
        struct stat what;
        int absolute = *path == '/';
        must(asprintf(&found, "%s%s%.*s/%s", absolute ? "" : cwd, absolute ? "" : "/", (int)(end - path), path, name) > 0);
        if (access(found, X_OK) == 0 && stat(found, &what) == 0 && !S_ISDIR(what.st_mode)) return found;
        free(found);
        if (!*end) return NULL;
    }
}

/* A new terminal: its master side; the path of the other into name. */
static int terminal(char *name) {
    int number, unlocked = 0, master = openat(pts, "ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    struct winsize size = {ROWS, COLUMNS, 0, 0};
    struct termios modes;
    if (master < 0) return -1;
    if (ioctl(master, TIOCSPTLCK, &unlocked) || ioctl(master, TIOCGPTN, &number) || ioctl(master, TIOCSWINSZ, &size) ||
        tcgetattr(master, &modes)) {
        close(master);
        return -1;
    }
    modes.c_lflag &= ~(ECHO | ECHOE | ECHOK | ECHONL);
    tcsetattr(master, TCSANOW, &modes);
    sprintf(name, "/dev/pts/%d", number);
    return master;
}

/* In the child: become the program, or tell why not. */
static void execute(const char *program, char **argv, char **env, const char *name, int adopts, int in, int out, int failed) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (*name) in = out = open(name, O_RDWR);
    if (in >= 0 && dup2(in, 0) == 0 && dup2(out, 1) == 1 && dup2(out, 2) == 2) {
        if (in > 2) close(in);
        if (adopts) prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(program, argv, env);
    }
    while (write(failed, &errno, sizeof errno) < 0 && errno == EINTR) {}
    _exit(127);
}

/* Text that ends within the request; moves on to the next one. */
static char *field(char **at, char *end) {
    char *text = *at;
    must(text < end);
    *at += strlen(text) + 1; /* the request ends with a null byte */
    return text;
}

static char **fields(char **at, char *end, size_t number) {
    char **found = calloc(number + 1, sizeof *found);
    must(found != NULL);
    for (size_t index = 0; index < number; index++) found[index] = field(at, end);
    return found;
}

/* spawn KIND CWD PATH number arguments… number NAME=VALUE…; KIND is "-", "t" (terminal) or "ta" (it adopts orphans). */
static void spawn(char *at, char *end, int *given, int number) {
    must(strcmp(field(&at, end), "spawn") == 0 && number >= 1);
    char *kind = field(&at, end), *cwd = field(&at, end), *path = field(&at, end);
    char **argv = fields(&at, end, strtoul(field(&at, end), NULL, 10));
    char **env = fields(&at, end, strtoul(field(&at, end), NULL, 10));
    char name[32] = "", text[4096];
    int kept[2], made = 0, code = 0, master = -1, tell[2] = {-1, -1};
    pid_t pid = -1;
    must(argv[0] != NULL && (*kind == 't' || number == 3));
    char *program = find(argv[0], path, cwd);
    if (!program) {
        snprintf(text, sizeof text, "no program %s in PATH=%s", argv[0], path);
        refuse(ENOENT, argv[0], text);
    } else if ((*kind == 't' && (master = terminal(name)) < 0) || pipe2(tell, O_CLOEXEC)) {
        refuse(errno, "", strerror(errno));
    } else if (chdir(cwd)) {
        refuse(errno, cwd, strerror(errno));
    } else if ((pid = fork()) == 0) {
        execute(program, argv, env, name, strchr(kind, 'a') != NULL, number == 3 ? given[1] : -1,
                number == 3 ? given[2] : -1, tell[1]);
    } else if (pid < 0) {
        refuse(errno, "", strerror(errno));
    } else {
        close(tell[1]);
        tell[1] = -1;
        ssize_t told;
        while ((told = read(tell[0], &code, sizeof code)) < 0 && errno == EINTR) {}
        if (told > 0) {
            waitpid(pid, NULL, 0);
            refuse(code, program, strerror(code));
        } else {
            /* Where memory runs out, the kernel shall choose among these and not this process. */
            snprintf(text, sizeof text, "/proc/%d/oom_score_adj", pid);
            int score = open(text, O_WRONLY | O_CLOEXEC);
            (void)!write(score, "500", 3); /* it may have ended */
            if (score >= 0) close(score);
            kept[made++] = syscall(SYS_pidfd_open, pid, 0);
            must(kept[0] >= 0);
            if (master >= 0) kept[made++] = master;
            table = realloc(table, (entries + 1) * sizeof *table);
            must(table != NULL);
            table[entries++] = (struct started){pid, fcntl(given[0], F_DUPFD_CLOEXEC, 0)};
            answer("ready", 5, kept, made);
            close(kept[0]);
        }
    }
    must(chdir("/") == 0);
    for (int index = 0; index < 2; index++)
        if (tell[index] >= 0) close(tell[index]);
    if (master >= 0) close(master);
    free(program);
    free(argv);
    free(env);
}

int main(int argc, char **argv) {
    /* Before anything else runs in the container: executing a program has made this process dumpable again. */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    must(argc == 2);
    pts = atoi(argv[1]);
    fcntl(CHANNEL, F_SETFD, FD_CLOEXEC);
    fcntl(pts, F_SETFD, FD_CLOEXEC);
    signal(SIGPIPE, SIG_IGN);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_SETMASK, &children, NULL);
    int wake = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    must(wake >= 0);
    collect();
    for (;;) {
        struct pollfd waits[2] = {{CHANNEL, POLLIN, 0}, {wake, POLLIN, 0}};
        if (poll(waits, 2, -1) < 0) continue;
        if (waits[1].revents) {
            struct signalfd_siginfo ended;
            while (read(wake, &ended, sizeof ended) > 0) {}
            collect();
        }
        if (waits[0].revents) {
            unsigned char head[4];
            int given[MOST], number = 0;
            receive((char *)head, 4, given, &number);
            size_t size = (size_t)head[0] << 24 | head[1] << 16 | head[2] << 8 | head[3];
            must(size > 0 && size < LARGEST);
            char *request = malloc(size);
            must(request != NULL);
            receive(request, size, given, &number);
            must(request[size - 1] == 0);
            spawn(request, request + size, given, number);
            free(request);
            for (int index = 0; index < number; index++) close(given[index]);
        }
    }
}
