/* The load generator of `bench.gateway`: kept-alive connections that ask, read to the end and ask again.

   load PORT CONNECTIONS SECONDS stream|whole TOKENS|FILE [key=KEY] [header=LINE] [turns=1|2] [fresh] [silence=8]

   turns=2: each second request of a connection goes on with the chat of the first, whose answer it sends along.
   fresh: every head has a request id and a trace parent that no other has. silence: seconds until an answer is lost.
   Every answer is read to its end and its text compared with what the engine must have said: so many of the
   stand-in's words (words.h), or what the file says, whose lines are in turn a body to send and its answer's text,
   escaped as in JSON. One record (struct record) for each request goes to stdout at the end, the first answer to a
   file's body that is not as it must be to stderr. Connections that break are made anew. SIGTERM: nothing more is asked. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "words.h"

#define ROOM (256 << 10)
#define SILENCE_S 8.0 /* longer than any fault may take; then it is lost */
#define REAL_SILENCE_S 60.0 /* of engines that share the cores with all else */
#define SCRIPTS 1024
#define HEADER "x-request-id: %016llx%016llx\r\ntraceparent: 00-%016llx%016llx-%016llx-01\r\n"
#define AGAIN_S 0.01

/* bench/gateway/loading.py reads them by the same names. */
enum outcome { OK, REFUSED, TRUNCATED, WRONG, BROKEN, UNREACHABLE, SILENT };

struct record {
    double began_s, first_s, whole_s, gap_s; /* when; then durations; the longest wait between two reads */
    int32_t status, outcome;
};

struct conn {
    int fd, is_open, is_asking, is_chunked, is_parsed, is_last;
    uint32_t number, key;
    const struct script *script;
    double ready_s, began_s, first_s, last_s, gap_s;
    char *raw, *body; /* as it came; without framing */
    size_t raw_len, raw_at, body_len, expected, left;
    int status, is_whole;
};

struct script {
    char *request, *text; /* what is sent; what must come, NULL: words */
    size_t request_len, text_len, fresh_at, key_at, answer_at; /* the last three: 0 where there is none */
};

static struct record *records;
static size_t record_count, record_room;
static struct script scripts[SCRIPTS];
static uint32_t script_count;
static int port, tokens, is_streamed, is_fresh, turns = 1;
static const char *authorization, *header;
static volatile sig_atomic_t is_ended;

static void end_it(int number)
{
    is_ended = number;
}

static void note(struct conn *c, enum outcome outcome, double now)
{
    static int is_told;
    if (outcome != OK && c->script->text && !is_told++)
        fprintf(stderr, "load: outcome %d, status %d: %.*s\n  to %s\n  must say %s\n", outcome, c->status,
                (int)(c->body_len < 4000 ? c->body_len : 4000), c->body, c->script->request, c->script->text);
    if (record_count == record_room)
        records = realloc(records, (record_room = record_room * 2 + 4096) * sizeof *records);
    records[record_count++] = (struct record){c->began_s, c->first_s ? c->first_s - c->began_s : now - c->began_s,
                                              now - c->began_s, c->gap_s, c->status, outcome};
    c->is_asking = 0;
}

static void hang_up(struct conn *c, double now)
{
    if (c->is_open)
        close(c->fd);
    c->is_open = 0, c->ready_s = now + AGAIN_S;
}

static int connected(struct conn *c)
{
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int yes = 1;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *)&where, sizeof where)) {
        close(c->fd);
        return 0;
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    return c->is_open = 1;
}

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

/* Fill in what is different in each request: the ids of its head, the number of its chat, the answer it goes on from. */
static void fill(struct conn *c, const struct script *script)
{
    static uint64_t ids;
    static uint32_t chats;
    if (!ids) /* those of another run, a microsecond later, are others */
        ids = (uint64_t)(now_s() * 1e9), chats = (uint32_t)(uint64_t)(now_s() * 1e6);
    if (script->fresh_at) {
        char lines[sizeof HEADER + 128];
        unsigned long long a = mixed(++ids), b = mixed(a + 1);
        int n = snprintf(lines, sizeof lines, HEADER, a, b, b, a, a ^ b);
        memcpy(script->request + script->fresh_at, lines, (size_t)n);
    }
    if (!script->key_at)
        return;
    char digits[16];
    if (c->number % (uint32_t)turns == 0)
        c->key = chats++;
    snprintf(digits, sizeof digits, "%010u", c->key);
    memcpy(script->request + script->key_at, digits, 10);
    for (int i = 0; i < tokens && script->answer_at; i++)
        spell(token_of(c->key, (uint32_t)i), script->request + script->answer_at + i * WORD);
}

static void ask(struct conn *c, int index, double now)
{
    c->began_s = c->last_s = now, c->first_s = c->gap_s = 0;
    c->raw_len = c->raw_at = c->body_len = c->left = 0;
    c->is_parsed = c->is_whole = c->status = 0;
    c->is_asking = 1;
    /* A chat begins with its first turn; the requests of a file come in any order. */
    c->script = &scripts[(c->number + (tokens ? 0 : (uint32_t)index)) % script_count];
    if (!c->is_open && !connected(c)) {
        note(c, UNREACHABLE, now_s());
        c->ready_s = now + AGAIN_S;
        return;
    }
    fill(c, c->script);
    c->number++;
    if (send(c->fd, c->script->request, c->script->request_len, 0) != (ssize_t)c->script->request_len)
        c->last_s = now; /* the end of the connection is found when it is read */
}

static void parse_head(struct conn *c)
{
    char *gap = memmem(c->raw, c->raw_len, "\r\n\r\n", 4);
    if (!gap)
        return;
    *gap = 0;
    c->status = (int)strtol(c->raw + 9, NULL, 10);
    c->is_chunked = strcasestr(c->raw, "\r\ntransfer-encoding: chunked") != NULL;
    char *length = strcasestr(c->raw, "\r\ncontent-length:");
    c->is_last = strcasestr(c->raw, "\r\nconnection: close") != NULL;
    c->expected = length ? strtoul(length + 17, NULL, 10) : (size_t)-1;
    c->raw_at = (size_t)(gap - c->raw) + 4;
    c->is_parsed = 1;
}

/* Take chunks out of their framing; returns 0 if it is none. */
static int unframe(struct conn *c)
{
    while (c->raw_at < c->raw_len) {
        if (!c->left) {
            char *line = c->raw + c->raw_at, *end = memmem(line, c->raw_len - c->raw_at, "\r\n", 2), *stop;
            if (!end)
                return 1;
            c->left = strtoul(line, &stop, 16) + 2;
            if (stop == line)
                return 0;
            c->raw_at = (size_t)(end - c->raw) + 2;
            if (c->left == 2)
                c->expected = 0;
        }
        size_t here = c->raw_len - c->raw_at < c->left ? c->raw_len - c->raw_at : c->left;
        size_t text = c->left > 2 ? c->left - 2 : 0;
        memcpy(c->body + c->body_len, c->raw + c->raw_at, here < text ? here : text);
        c->body_len += here < text ? here : text;
        c->raw_at += here, c->left -= here;
        if (!c->expected && !c->left)
            return c->is_whole = 1;
    }
    return 1;
}

/* Move an answer's text to the front of its body, as it is escaped; return how long it is. */
static size_t gather(struct conn *c)
{
    char *at = c->body, *to = c->body;
    while ((at = strstr(at, "\"content\":"))) {
        at += 10 + strspn(at + 10, " ");
        if (*at++ != '"')
            continue;
        while (*at && *at != '"') {
            if (*at == '\\' && at[1])
                *to++ = *at++;
            *to++ = *at++;
        }
    }
    return (size_t)(to - c->body);
}

static enum outcome judged(struct conn *c)
{
    c->body[c->body_len] = 0;
    if (c->status != 200)
        return REFUSED;
    int is_done = strstr(c->body, "data: [DONE]") != NULL;
    size_t length = gather(c);
    const struct script *script = c->script;
    if (is_streamed && !is_done)
        return BROKEN;
    if (script->text)
        return length == script->text_len && !memcmp(c->body, script->text, length) ? OK : WRONG;
    char word[WORD];
    for (int i = 0; i < tokens && (size_t)i * WORD < length; i++) {
        spell(token_of(c->key, (uint32_t)i), word);
        if (memcmp(c->body + i * WORD, word, WORD))
            return WRONG;
    }
    return length == (size_t)tokens * WORD ? OK : WRONG;
}

static void read_more(struct conn *c, double now)
{
    ssize_t n = recv(c->fd, c->raw + c->raw_len, ROOM - c->raw_len - 1, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        c->is_whole = n == 0 && c->is_parsed && !c->is_chunked && c->expected == (size_t)-1;
        if (c->is_asking)
            note(c, c->is_whole ? judged(c) : TRUNCATED, now);
        hang_up(c, now);
        return;
    }
    if (!c->first_s)
        c->first_s = now;
    else if (now - c->last_s > c->gap_s)
        c->gap_s = now - c->last_s;
    c->last_s = now;
    c->raw_len += (size_t)n;
    c->raw[c->raw_len] = 0;
    if (!c->is_parsed)
        parse_head(c);
    if (!c->is_parsed)
        return;
    if (c->is_chunked && !unframe(c)) {
        note(c, TRUNCATED, now);
        hang_up(c, now);
    } else if (!c->is_chunked) {
        memcpy(c->body, c->raw + c->raw_at, c->body_len = c->raw_len - c->raw_at);
        c->is_whole = c->body_len >= c->expected;
    }
}

static struct script *add(const char *body, char *text)
{
    struct script *script = &scripts[script_count++];
    char more[4096] = "", lines[sizeof HEADER + 128] = "";
    if (authorization)
        snprintf(more, sizeof more, "authorization: Bearer %s\r\n", authorization);
    if (header)
        snprintf(more + strlen(more), sizeof more - strlen(more), "%s\r\n", header);
    if (is_fresh)
        snprintf(lines, sizeof lines, HEADER, 0ull, 0ull, 0ull, 0ull, 0ull);
    size_t room = strlen(body) + strlen(more) + strlen(lines) + 1024;
    script->request = malloc(room);
    script->request_len = (size_t)snprintf(script->request, room, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%s%scontent-length: %zu\r\n\r\n%s",
                                           more, lines, strlen(body), body);
    script->fresh_at = is_fresh ? (size_t)(strstr(script->request, lines) - script->request) : 0;
    script->text = text;
    script->text_len = text ? strlen(text) : 0;
    return script;
}

static void add_words(int turn)
{
    char body[16384], prompt[1024] = "", answer[8192] = "", later[12288] = "";
    for (int i = 0; i < 200; i++)
        strcat(prompt, "word ");
    int room = (int)sizeof answer / WORD - 1, said = (tokens < room ? tokens : room) * WORD;
    memset(answer, '#', (size_t)said), answer[said] = 0;
    if (turn)
        snprintf(later, sizeof later, "},{\"role\":\"assistant\",\"content\":\"%s\"},{\"role\":\"user\",\"content\":\"And what comes after that?\"", answer);
    snprintf(body, sizeof body, "{\"model\":\"bench\"%s,\"messages\":[{\"role\":\"user\",\"content\":\"key=0000000000 %s\"%s}]}",
             is_streamed ? ",\"stream\":true" : "", prompt, later);
    struct script *script = add(body, NULL);
    script->key_at = (size_t)(strstr(script->request, "key=") - script->request) + 4;
    script->answer_at = turn && said == tokens * WORD ? (size_t)(strchr(script->request, '#') - script->request) : 0;
}

static char *line_of(FILE *file)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t length = getline(&line, &room, file);
    if (length <= 0)
        return NULL;
    line[length - 1] = 0;
    return line;
}

static int add_file(const char *path)
{
    FILE *file = fopen(path, "r");
    char *body, *text;
    while (file && script_count < SCRIPTS && (body = line_of(file)) && (text = line_of(file)))
        add(body, text);
    return script_count > 0;
}

int main(int argc, char **argv)
{
    if (argc < 6)
        return 2;
    port = atoi(argv[1]), tokens = atoi(argv[5]), is_streamed = !strcmp(argv[4], "stream");
    int count = atoi(argv[2]);
    double silence_s = tokens ? SILENCE_S : REAL_SILENCE_S;
    for (int i = 6; i < argc; i++) {
        if (!strncmp(argv[i], "key=", 4))
            authorization = argv[i] + 4;
        else if (!strncmp(argv[i], "header=", 7))
            header = argv[i] + 7;
        else if (!strncmp(argv[i], "turns=", 6))
            turns = atoi(argv[i] + 6);
        else if (!strncmp(argv[i], "silence=", 8))
            silence_s = atof(argv[i] + 8);
        else if (!strcmp(argv[i], "fresh"))
            is_fresh = 1;
        else
            return 2;
    }
    if (turns < 1 || turns > 2)
        return 2;
    for (int turn = 0; tokens && turn < turns; turn++)
        add_words(turn);
    if (!tokens && !add_file(argv[5]))
        return 2;
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, end_it);
    struct conn *conns = calloc((size_t)count, sizeof *conns);
    struct pollfd *polls = calloc((size_t)count, sizeof *polls);
    for (int i = 0; i < count; i++)
        conns[i].raw = malloc(ROOM), conns[i].body = malloc(ROOM);
    double until_s = now_s() + atof(argv[3]);
    for (;;) {
        double now = now_s();
        if (is_ended)
            until_s = 0;
        int waiting = 0, soonest_ms = 1000;
        for (int i = 0; i < count; i++) {
            struct conn *c = &conns[i];
            if (!c->is_asking && now < until_s && now >= c->ready_s)
                ask(c, i, now);
            if (c->is_asking && now - c->last_s > silence_s)
                note(c, SILENT, now), hang_up(c, now);
            if (!c->is_asking && now < until_s)
                soonest_ms = 10;
            waiting += c->is_asking;
            polls[i] = (struct pollfd){.fd = c->is_asking ? c->fd : -1, .events = POLLIN};
        }
        if (!waiting && now >= until_s)
            break;
        poll(polls, (nfds_t)count, soonest_ms);
        now = now_s();
        for (int i = 0; i < count; i++) {
            struct conn *c = &conns[i];
            if (!c->is_asking || !polls[i].revents)
                continue;
            read_more(c, now);
            if (c->is_asking && c->is_whole) {
                note(c, judged(c), now);
                if (c->is_last)
                    hang_up(c, now - AGAIN_S);
                if (now < until_s)
                    ask(c, i, now_s());
            }
        }
    }
    fwrite(records, sizeof *records, record_count, stdout);
    return 0;
}
