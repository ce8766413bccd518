/* A stand-in engine for `bench.gateway`: costs little, so that what is seen is the gateway.

   engine PORT REPLICA [tokens=61] [pace_us=0] [delay_us=0]

   Streams are `tokens` + 3 events, one write each, pace_us apart (0: one in each turn of the loop, as a batch of
   sequences makes them); other answers come after delay_us. With `x-fleet-resumable: 1` events carry marks, and a
   body with `fleet` is continued; tokens that this engine would not have made are refused with 409.
   SIGTERM drains. GET /pace/US sets the pace, /stats counts (marked: streams with marks). GET /fault/MODE misbehaves from then on, also in streams that are under way:
   none, blackhole (accepts, never answers), garbage, half (a piece, then the end), length (a wrong chunk size).
   POST /v1/link begins an engine link (machinery/engine_link.py), which has everything of one turn of the loop in one
   write, as of an engine's step. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "words.h"

#define CONNECTIONS 16384
#define INPUT (64 << 10)
#define OUTPUT (48 << 10)
#define ID 80

enum mode { NONE, BLACKHOLE, GARBAGE, HALF, LENGTH };
static const char *MODES[] = {"none", "blackhole", "garbage", "half", "length"};

struct conn {
    int fd;
    char *in, *out;
    size_t in_size, in_len, out_len, out_sent;
    int is_streaming, is_waiting, is_resumable, is_chat, is_closing, is_introduced;
    uint32_t key, next; /* the next event: 0 the role, 1..tokens, then the finish, then [DONE] */
    double due_s;
    char id[ID];
    long created;
    size_t out_size;
    int is_link, reported; /* of a link: the load that it has reported */
    int link_fd;           /* of a stream of a link: its connection; 0: no stream of a link */
    uint32_t stream;
    long window; /* of a stream of a link: bytes that it may send before more are granted */
};

enum kind { REQUEST = 1, CANCEL = 3, WINDOW = 4, PING = 5, STATUS = 16, EVENTS = 17, END = 18, GAUGES = 21, RECORDED = 23 };
static const long WINDOW_BYTES = 256 << 10;
static int place_of[65536]; /* in conns, by descriptor */

static struct conn conns[CONNECTIONS];
static struct pollfd polls[CONNECTIONS + 1];
static int count;
static int tokens = 61;
static double pace_s, delay_s;
static const char *replica;
static volatile sig_atomic_t is_draining;
static enum mode mode;
static long served, resumed, refused, mismatched, marked;
static double first_s;

/* The prompt's number, put into it by the load generator as "key=0000000042". */
static uint32_t key_in(const char *body)
{
    const char *at = strstr(body, "key=");
    return at ? (uint32_t)strtoul(at + 4, NULL, 10) : 0;
}

static void on_term(int signal) { (void)signal, is_draining = 1; }

static int busy(void)
{
    int found = 0;
    for (int i = 0; i < count; i++)
        found += conns[i].is_streaming || conns[i].is_waiting;
    return found;
}

static void put(struct conn *c, const char *data, size_t size)
{
    if (c->out_len + size > c->out_size && c->is_link)
        c->out = realloc(c->out, c->out_size = 2 * (c->out_len + size));
    if (c->out_len + size <= c->out_size)
        memcpy(c->out + c->out_len, data, size), c->out_len += size;
    else
        c->is_closing = 1;
}

static void flush(struct conn *c)
{
    ssize_t n = send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, 0);
    if (n < 0 && errno != EAGAIN)
        c->is_closing = 1, c->out_len = c->out_sent = 0;
    if (n > 0)
        c->out_sent += (size_t)n;
    if (c->out_sent == c->out_len)
        c->out_sent = c->out_len = 0;
}

static struct conn *link_of(struct conn *c) { return &conns[place_of[c->link_fd]]; }

/* Declares `more` bytes too many, for frames that shall be wrong. */
static void put_frame(struct conn *link, uint32_t stream, enum kind kind, const void *data, size_t size, size_t more)
{
    uint32_t top[2] = {htonl(stream), htonl((uint32_t)kind << 24 | (uint32_t)(size + more))};
    put(link, (char *)top, sizeof top);
    put(link, data, size);
}

static void put_status(struct conn *c, int status, const char *kind)
{
    char payload[128];
    int size = snprintf(payload + 6, sizeof payload - 6, "content-type: %s\r\n", kind);
    unsigned char top[6] = {0x92, 0xcd, (unsigned char)(status >> 8), (unsigned char)status, 0xc4, (unsigned char)size};
    memcpy(payload, top, sizeof top);
    put_frame(link_of(c), c->stream, STATUS, payload, (size_t)size + 6, 0);
}

static void put_gauges(struct conn *link)
{
    unsigned char payload[64];
    size_t at = 0, size = strlen(replica) & 31;
    int load = busy();
    payload[at++] = 0x96, payload[at++] = (unsigned char)(0xa0 | size);
    memcpy(payload + at, replica, size), at += size;
    payload[at++] = is_draining ? 0xc2 : 0xc3;
    payload[at++] = 0xcd, payload[at++] = (unsigned char)(load >> 8), payload[at++] = (unsigned char)load;
    payload[at++] = 0, payload[at++] = 0xc0, payload[at++] = 0xc0;
    link->reported = load;
    put_frame(link, 0, GAUGES, payload, at, 0);
}

static int head(char *to, size_t room, const char *status, const char *kind, const char *more)
{
    return snprintf(to, room,
                    "HTTP/1.1 %s\r\ncontent-type: %s\r\nx-fleet-node: bench\r\nx-fleet-replica: %s\r\n"
                    "x-fleet-in-flight: %d\r\nx-fleet-queued: 0\r\n%s\r\n",
                    status, kind, replica, busy(), more);
}

static void whole(struct conn *c, const char *status, const char *body, size_t size, size_t declared)
{
    char top[512], length[64];
    if (c->link_fd) {
        put_status(c, atoi(status), "application/json");
        put_frame(link_of(c), c->stream, END, body, size, declared - size);
        c->is_closing = 1;
        if (declared != size)
            link_of(c)->is_closing = 1;
        return;
    }
    snprintf(length, sizeof length, "content-length: %zu\r\n", declared);
    put(c, top, (size_t)head(top, sizeof top, status, "application/json", length));
    put(c, body, size);
}

static void say(struct conn *c, const char *status, const char *body)
{
    whole(c, status, body, strlen(body), strlen(body));
}

static void answer(struct conn *c)
{
    static char body[OUTPUT / 2];
    c->is_waiting = 0;
    if (mode == BLACKHOLE)
        return;
    if (mode == GARBAGE) {
        put(c->link_fd ? link_of(c) : c, "\x16\x03\x01 this is not HTTP\n\n", 21);
        return;
    }
    size_t at = (size_t)sprintf(body, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%ld,\"model\":\"bench\",\"choices\":[{\"index\":0,%s",
                                c->id, c->is_chat ? "chat.completion" : "text_completion", c->created,
                                c->is_chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    for (int i = 0; i < tokens; i++, at += WORD)
        spell(token_of(c->key, (uint32_t)i), body + at);
    at += (size_t)sprintf(body + at, "\"%s,\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":200,\"completion_tokens\":%d,\"total_tokens\":%d}}",
                          c->is_chat ? "}" : "", tokens, tokens + 200);
    if (mode == HALF || mode == LENGTH) {
        whole(c, "200 OK", body, mode == HALF ? at / 2 : at, mode == HALF ? at : at + 10);
        c->is_closing = 1;
        return;
    }
    whole(c, "200 OK", body, at, at);
}

/* Writes the length of a resume record and the record: one token, or none; in the first one what begins an answer, in the last
   one that its choice ends and the number of tokens. */
static int put_record(struct conn *c, unsigned char *to, int has_token, uint32_t token, int is_last)
{
    int at = 4, size = (int)strlen(c->id) & 31;
    to[at++] = is_last ? 0x94 : c->is_introduced ? 0x91 : 0x92;
    to[at++] = 0x80 | has_token;
    if (has_token) {
        uint32_t value = htonl(token);
        to[at++] = 0, to[at++] = 0x91, to[at++] = 0xce;
        memcpy(to + at, &value, 4), at += 4;
    }
    if (!c->is_introduced) {
        uint32_t created = htonl((uint32_t)c->created);
        at += sprintf((char *)to + at, "%c%c%c%08x%c", 0x96, 7, 0xa8, c->key, 0xa0 | size);
        memcpy(to + at, c->id, (size_t)size), at += size;
        to[at++] = 0xce, memcpy(to + at, &created, 4), at += 4;
        to[at++] = 0xcc, to[at++] = 200, to[at++] = 64;
        c->is_introduced = 1;
    } else if (is_last) {
        to[at++] = 0xc0;
    }
    if (is_last)
        to[at++] = 0x91, to[at++] = 0, to[at++] = 0xcd, to[at++] = (unsigned char)(tokens >> 8), to[at++] = (unsigned char)tokens;
    uint32_t length = htonl((uint32_t)(at - 4));
    memcpy(to, &length, 4);
    return at;
}

/* One event as a chunk; returns whether the stream goes on. */
static int event(struct conn *c)
{
    char text[1024], chunk[1200], delta[64] = "";
    int at = 0, is_recorded = c->is_resumable && c->link_fd;
    uint32_t i = c->next++;
    if (mode == BLACKHOLE)
        return 0;
    if (mode == GARBAGE) {
        put(c->link_fd ? link_of(c) : c, "zz\x01\x02 garbage \xff\xfe\r\n\r\n", 17);
        return 0;
    }
    if (i == (uint32_t)tokens + 2) {
        if (c->link_fd)
            put_frame(link_of(c), c->stream, END, "data: [DONE]\n\n", 14, 0), c->is_closing = 1;
        else
            put(c, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
        return 0;
    }
    const char *finish = i == (uint32_t)tokens + 1 ? "\"stop\"" : "null";
    if (i >= 1 && i <= (uint32_t)tokens) {
        uint32_t token = token_of(c->key, i - 1);
        strcpy(delta, c->is_chat ? "\"content\":\"" : "\"");
        size_t n = strlen(delta);
        spell(token, delta + n);
        strcpy(delta + n + WORD, "\"");
    } else if (i == 0) {
        strcpy(delta, c->is_chat ? "\"role\":\"assistant\",\"content\":\"\",\"refusal\":null" : "\"\"");
    } else if (!c->is_chat) {
        strcpy(delta, "\"\"");
    }
    if (is_recorded) {
        int has_token = i >= 1 && i <= (uint32_t)tokens;
        at = put_record(c, (unsigned char *)text, has_token, has_token ? token_of(c->key, i - 1) : 0, i == (uint32_t)tokens + 1);
    }
    at += sprintf(text + at, c->is_chat ? "data: {\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":%ld,\"model\":\"bench\",\"system_fingerprint\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{%s},\"logprobs\":null,\"finish_reason\":%s}]}\n\n"
                                        : "data: {\"id\":\"%s\",\"object\":\"text_completion\",\"created\":%ld,\"model\":\"bench\",\"system_fingerprint\":\"bench\",\"choices\":[{\"index\":0,\"text\":%s,\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                  c->id, c->created, delta, finish);
    if (c->link_fd) {
        struct conn *link = link_of(c);
        c->window -= at;
        put_frame(link, c->stream, is_recorded ? RECORDED : EVENTS, text, (size_t)(mode == HALF ? at / 2 : at), mode == HALF ? (size_t)(at - at / 2) : mode == LENGTH ? 10 : 0);
        if (mode == HALF)
            link->is_closing = 1;
        return mode == NONE;
    }
    int size = sprintf(chunk, "%x\r\n", mode == LENGTH ? at - 3 : at);
    memcpy(chunk + size, text, (size_t)at);
    memcpy(chunk + size + at, "\r\n", 2);
    size += at + 2;
    put(c, chunk, (size_t)(mode == HALF ? size / 2 : size));
    if (mode == HALF)
        c->is_closing = 1;
    return mode == NONE;
}

static void begin_stream(struct conn *c)
{
    char top[512];
    if (mode == BLACKHOLE)
        return;
    if (c->link_fd)
        put_status(c, 200, "text/event-stream");
    else
        put(c, top, (size_t)head(top, sizeof top, "200 OK", "text/event-stream", "transfer-encoding: chunked\r\n"));
    c->is_streaming = 1, c->due_s = now_s();
    if (pace_s > 0) /* all streams of an engine get a token in the same step */
        c->due_s = ((long)(c->due_s / pace_s) + 1) * pace_s;
    marked += c->is_resumable;
}

static void copy_string(const char *from, const char *name, char *to)
{
    const char *at = strstr(from, name);
    if (!at)
        return;
    at += strlen(name);
    while (*at && *at != '"')
        at++;
    size_t n = *at ? strcspn(at + 1, "\"") : 0;
    if (n && n < ID)
        memcpy(to, at + 1, n), to[n] = 0;
}

/* Take up what another engine began; returns whether its tokens are those that we would have made. */
static int continued(struct conn *c, const char *body)
{
    const char *fleet = strstr(body, "\"fleet\"");
    if (!fleet)
        return 1;
    const char *at = strstr(fleet, "\"tokens\""), *created = strstr(fleet, "\"created\"");
    char digest[ID] = "", expected[ID];
    if (!at || !(at = strchr(at, '[')))
        return 0;
    uint32_t i = 0;
    for (at++; *at && *at != ']'; i++) {
        char *end;
        if (strtoul(at, &end, 10) != token_of(c->key, i) || end == at)
            return 0;
        at = end + strspn(end, ", ");
    }
    snprintf(expected, ID, "%08x", c->key);
    copy_string(fleet, "\"prompt\":", digest);
    copy_string(fleet, "\"id\":", c->id);
    if (strcmp(digest, expected) || !created)
        return 0;
    c->created = strtol(created + 10, NULL, 10);
    c->next = i + 1;
    resumed++;
    return 1;
}

static void ask(struct conn *c, const char *path, const char *top, const char *body)
{
    static long number;
    if (is_draining) {
        say(c, "503 Service Unavailable", "{\"error\":{\"message\":\"draining\",\"type\":\"server_error\",\"param\":null,\"code\":\"draining\"}}");
        c->is_closing = 1, refused++;
        return;
    }
    if (!first_s)
        first_s = now_s();
    served++;
    c->key = key_in(body);
    c->next = 0, c->is_introduced = 0;
    c->is_chat = strstr(path, "chat") != NULL;
    c->is_resumable = strcasestr(top, "\r\nx-fleet-resumable: 1") != NULL;
    snprintf(c->id, ID, "chatcmpl-%s-%ld", replica, ++number);
    c->created = 1700000000;
    if (!continued(c, body)) {
        mismatched++;
        say(c, "409 Conflict", "{\"error\":{\"message\":\"these tokens or this prompt are not mine\",\"type\":\"invalid_request_error\",\"param\":\"fleet\",\"code\":\"prompt_differs\"}}");
        return;
    }
    const char *stream = strstr(body, "\"stream\":");
    if (stream && !strncmp(stream + 9 + strspn(stream + 9, " "), "true", 4)) {
        begin_stream(c);
    } else {
        c->is_waiting = 1, c->due_s = now_s() + delay_s;
        if (delay_s == 0)
            answer(c);
    }
}

static void look_up(struct conn *c, const char *path)
{
    char body[512];
    if (!strncmp(path, "/fault/", 7)) {
        for (int i = 0; i < 5; i++)
            if (!strcmp(path + 7, MODES[i]))
                mode = (enum mode)i;
        say(c, "200 OK", "{}");
    } else if (!strncmp(path, "/pace/", 6)) {
        pace_s = atoi(path + 6) * 1e-6;
        say(c, "200 OK", "{}");
    } else if (!strcmp(path, "/stats")) {
        snprintf(body, sizeof body, "{\"served\":%ld,\"resumed\":%ld,\"refused\":%ld,\"mismatched\":%ld,\"marked\":%ld,\"in_flight\":%d,\"first_s\":%.6f}",
                 served, resumed, refused, mismatched, marked, busy(), first_s);
        say(c, "200 OK", body);
    } else if (is_draining) {
        say(c, "503 Service Unavailable", "{}");
    } else if (!strcmp(path, "/v1/models")) {
        say(c, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1,\"owned_by\":\"bench\"}]}");
    } else {
        say(c, "200 OK", "{\"status\":\"ok\",\"state\":\"Ready\",\"ready\":true,\"model_path\":\"bench\",\"served_model_name\":\"bench\",\"model_id\":\"bench\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.0\"}");
    }
}

/* Return the string or bytes of msgpack at `at`, and move `at` behind it. */
static char *unpacked(unsigned char **at, size_t *size)
{
    unsigned char kind = *(*at)++;
    if (kind == 0xd9 || kind == 0xc4)
        *size = *(*at)++;
    else if (kind == 0xc5)
        *size = (size_t)(*at)[0] << 8 | (*at)[1], *at += 2;
    else
        *size = kind & 31;
    char *found = (char *)*at;
    *at += *size;
    return found;
}

/* Begin a stream of a link; the body must be in this frame. */
static void begin_request(int fd, uint32_t stream, unsigned char *data, size_t size)
{
    static char top[INPUT], body[INPUT];
    char name[256];
    size_t n, begin = 2 + ((size_t)data[0] << 8 | data[1]);
    unsigned char *at = data + 3;
    if (count >= CONNECTIONS || begin > size || size - begin >= INPUT)
        return;
    unpacked(&at, &n);
    char *path = unpacked(&at, &n);
    snprintf(name, sizeof name, "%.*s", (int)(n < 200 ? n : 200), path);
    char *lines = unpacked(&at, &n);
    snprintf(top, sizeof top, "\r\n%.*s", (int)n, lines);
    memcpy(body, data + begin, size - begin), body[size - begin] = 0;
    struct conn *c = &conns[count++];
    memset(c, 0, sizeof *c);
    c->fd = -1, c->link_fd = fd, c->stream = stream, c->window = WINDOW_BYTES;
    ask(c, name, top, body);
}

static void hear_link(struct conn *c)
{
    size_t at = 0;
    int fd = c->fd;
    while (c->in_len - at >= 8) {
        uint32_t top[2];
        memcpy(top, c->in + at, 8);
        uint32_t stream = ntohl(top[0]), word = ntohl(top[1]);
        size_t size = word & 0xffffff;
        if (c->in_len - at < 8 + size)
            break;
        if (word >> 24 == REQUEST)
            begin_request(fd, stream, (unsigned char *)c->in + at + 8, size);
        else if (word >> 24 == PING && mode != BLACKHOLE)
            put_gauges(c);
        else if (word >> 24 == CANCEL || (word >> 24 == WINDOW && size == 4))
            for (int i = 0; i < count; i++)
                if (conns[i].link_fd == fd && conns[i].stream == stream) {
                    if (word >> 24 == CANCEL) {
                        conns[i].is_closing = 1, conns[i].is_streaming = conns[i].is_waiting = 0;
                    } else {
                        memcpy(top, c->in + at + 8, 4);
                        conns[i].window += ntohl(top[0]);
                    }
                }
        at += 8 + size;
    }
    c->in_len -= at;
    memmove(c->in, c->in + at, c->in_len);
}

/* Serve what is complete in the input; one request at a time. */
static void hear(struct conn *c)
{
    if (c->is_link) {
        hear_link(c);
        return;
    }
    while (c->in_len && !c->is_streaming && !c->is_waiting && !c->is_closing) {
        c->in[c->in_len] = 0;
        char *gap = strstr(c->in, "\r\n\r\n");
        if (!gap)
            return;
        size_t size = (size_t)(gap - c->in) + 4, length = 0;
        *gap = 0;
        char *at = strcasestr(c->in, "\r\ncontent-length:");
        if (at)
            length = strtoul(at + 17, NULL, 10);
        if (strcasestr(c->in, "\r\ntransfer-encoding: chunked")) {
            char *end = strstr(gap + 4, "\r\n0\r\n\r\n");
            if (!end) {
                *gap = '\r';
                return;
            }
            length = (size_t)(end + 7 - (gap + 4));
        }
        if (c->in_len < size + length) {
            *gap = '\r';
            return;
        }
        char saved = c->in[size + length];
        c->in[size + length] = 0;
        char *path = strchr(c->in, ' ');
        if (!path) {
            c->is_closing = 1;
            return;
        }
        path++;
        size_t n = strcspn(path, " ?\r\n");
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)(n < 200 ? n : 200), path);
        if (!strcmp(name, "/v1/link")) {
            static const char SWITCHING[] = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: fleet-link\r\n\r\n";
            put(c, SWITCHING, sizeof SWITCHING - 1);
            c->is_link = 1, c->in_len = 0;
            put_gauges(c);
            return;
        }
        if (c->in[0] == 'P')
            ask(c, name, c->in, gap + 4);
        else
            look_up(c, name);
        c->in[size + length] = saved;
        c->in_len -= size + length;
        memmove(c->in, c->in + size + length, c->in_len);
    }
}

static int listening(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&where, sizeof where) || listen(fd, 1024)) {
        perror("listen");
        exit(3);
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void welcome(int listener)
{
    int fd, yes = 1;
    while (count < CONNECTIONS && (fd = accept(listener, NULL, NULL)) >= 0) {
        fcntl(fd, F_SETFL, O_NONBLOCK);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct conn *c = &conns[count++];
        memset(c, 0, sizeof *c);
        c->fd = fd, c->in_size = INPUT, c->out_size = OUTPUT;
        c->in = malloc(INPUT), c->out = malloc(OUTPUT);
        place_of[fd] = count - 1;
    }
}

static void receive(struct conn *c)
{
    if (c->in_len + 1 >= c->in_size)
        c->in = realloc(c->in, c->in_size *= 2);
    ssize_t n = recv(c->fd, c->in + c->in_len, c->in_size - c->in_len - 1, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
        c->is_closing = 1, c->out_len = c->out_sent = 0;
        return;
    }
    if (n > 0)
        c->in_len += (size_t)n;
    hear(c);
}

/* Whether a stream waits for the gateway to read. */
static int is_held(struct conn *c) { return c->link_fd && c->window <= 0; }

static void work(struct conn *c, double now)
{
    if (c->is_waiting && c->due_s <= now)
        answer(c);
    size_t unsent = c->link_fd ? link_of(c)->out_sent : c->out_len; /* a link is behind once a write was short */
    if (c->is_streaming && c->due_s <= now && !unsent && !is_held(c)) {
        c->is_streaming = event(c);
        c->due_s += pace_s;
    }
    if (c->out_len && !c->is_link)
        flush(c);
    if (!c->is_streaming && !c->is_waiting && !c->out_len && c->in_len && !c->is_link)
        hear(c);
}

static void flush_link(struct conn *c)
{
    if (c->reported != busy() && c->out_len && !c->out_sent && mode == NONE)
        put_gauges(c);
    if (c->out_len)
        flush(c);
}

static int next_wait_ms(double now)
{
    double least = 1.0;
    for (int i = 0; i < count; i++)
        if ((conns[i].is_waiting || (conns[i].is_streaming && !conns[i].out_len && !is_held(&conns[i]))) && conns[i].due_s - now < least)
            least = conns[i].due_s - now;
    return least <= 0 ? 0 : (int)(least * 1000) + 1;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    replica = argv[2];
    for (int i = 3; i < argc; i++) {
        if (!strncmp(argv[i], "tokens=", 7))
            tokens = atoi(argv[i] + 7);
        else if (!strncmp(argv[i], "pace_us=", 8))
            pace_s = atoi(argv[i] + 8) * 1e-6;
        else if (!strncmp(argv[i], "delay_us=", 9))
            delay_s = atoi(argv[i] + 9) * 1e-6;
        else
            return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, on_term);
    int listener = listening(atoi(argv[1]));
    while (!is_draining || busy()) {
        polls[0] = (struct pollfd){.fd = listener, .events = POLLIN};
        for (int i = 0; i < count; i++)
            polls[i + 1] = (struct pollfd){.fd = conns[i].fd, .events = (short)(POLLIN | (conns[i].out_len ? POLLOUT : 0))};
        int known = count;
        poll(polls, (nfds_t)known + 1, next_wait_ms(now_s()));
        double now = now_s();
        for (int i = 0; i < known; i++) {
            if (polls[i + 1].revents & (POLLIN | POLLHUP | POLLERR))
                receive(&conns[i]);
            work(&conns[i], now);
        }
        for (int i = known; i < count; i++)
            work(&conns[i], now); /* streams that have just begun */
        for (int i = 0; i < count; i++)
            if (conns[i].is_link)
                flush_link(&conns[i]);
        for (int i = 0; i < count; i++)
            if (conns[i].link_fd && link_of(&conns[i])->is_closing)
                conns[i].is_closing = 1;
        for (int i = count - 1; i >= 0; i--)
            if (conns[i].is_closing && !conns[i].out_len) {
                if (conns[i].fd >= 0)
                    close(conns[i].fd);
                free(conns[i].in), free(conns[i].out);
                conns[i] = conns[--count];
                if (conns[i].fd >= 0 && i < count)
                    place_of[conns[i].fd] = i;
            }
        if (polls[0].revents)
            welcome(listener);
    }
    return 0;
}
