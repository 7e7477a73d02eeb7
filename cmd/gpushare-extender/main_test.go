package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpushare/gpushare/cmd/internal/program/programtest"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// TestBadFlags checks that a wrong setting ends the process with a message that names the flag.
func TestBadFlags(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	defer taken.Close()
	nonsense := filepath.Join(t.TempDir(), "nonsense")
	check.Must(t, os.WriteFile(nonsense, []byte("{{{"), 0o600))
	kubeconfig := writeKubeconfig(t, "http://127.0.0.1:1")

	tests := map[string]struct {
		args []string
		want string
	}{
		"an unknown flag":           {[]string{"--no-such-flag"}, "unknown flag: --no-such-flag"},
		"an argument":               {[]string{"something"}, "unknown command \"something\""},
		"a bad card policy":         {[]string{"--card-policy=best"}, `--card-policy: unknown policy "best": want binpack or spread`},
		"a bad node policy":         {[]string{"--node-policy="}, `--node-policy: unknown policy "": want least-waste or binpack or spread`},
		"negative filter-best":      {[]string{"--filter-best=-1"}, "--filter-best must not be negative"},
		"bind timeout too long":     {[]string{"--bind-timeout=2m"}, "--bind-timeout must be positive, and 1m0s at most"},
		"no bind timeout":           {[]string{"--bind-timeout=0s"}, "--bind-timeout must be positive"},
		"negative bind window":      {[]string{"--bind-window=-1ms"}, "--bind-window must be between 0 and 500ms"},
		"a sample of more than all": {[]string{"--percentage-of-nodes-to-score=101"}, "--percentage-of-nodes-to-score must be between 0 and 100"},
		"bind window too long":      {[]string{"--bind-window=501ms"}, "--bind-window must be between 0 and 500ms"},
		"a duration without unit":   {[]string{"--bind-timeout=4"}, `invalid argument "4" for "--bind-timeout" flag`},
		"gang hold too long":        {[]string{"--gang-hold=2m"}, "--gang-hold must be between 0 and 1m0s"},
		"negative gang hold":        {[]string{"--gang-hold=-1s"}, "--gang-hold must be between 0 and 1m0s"},
		"too little patience":       {[]string{"--gang-patience=1s"}, "--gang-patience must be positive, and not less than --gang-hold"},
		"a bad overuse policy":      {[]string{"--overuse-policy=shrug"}, `--overuse-policy: unknown policy "shrug": want report or evict`},
		"an unknown fair share":     {[]string{"--fair-share=on"}, `--fair-share: unknown mode "on": want off, dispatch or reclaim`},
		"a reclaim at once":         {[]string{"--fair-share-reclaim-after=0s"}, "--fair-share-reclaim-after must be positive"},
		"a negative run time":       {[]string{"--fair-share-min-runtime=-1s"}, "--fair-share-min-runtime must not be negative"},
		"a bad kind of tenant":      {[]string{"--fair-share-by=label:"}, `--fair-share-by: want namespace or label:KEY with the key of a label, got "label:"`},
		"a kind without a key":      {[]string{"--fair-share-by=team"}, `--fair-share-by: want namespace or label:KEY with the key of a label, got "team"`},
		"negative provisioning":     {[]string{"--fair-share-provisioning=-1"}, "--fair-share-provisioning must not be negative"},
		"a bad failure policy":      {[]string{"--gang-failure-policy=shrug"}, `unknown policy "shrug": want evict or keep`},
		"a bad verbosity":           {[]string{"-v=much"}, `invalid argument "much" for "-v, --v" flag`},
		"a certificate, no key":     {[]string{"--tls-cert-file=x"}, "--tls-cert-file and --tls-key-file must be set together"},
		"no client names":           {[]string{"--tls-cert-file=x", "--tls-key-file=x", "--client-ca-file=x", "--client-names="}, "--client-names must not be empty"},
		"an empty client name":      {[]string{"--tls-cert-file=x", "--tls-key-file=x", "--client-ca-file=x", "--client-names=a,"}, "or have an empty name"},
		"an unknown log format":     {[]string{"--logging-format=xml"}, `--logging-format, -v: format: Invalid value: "xml": Unsupported log format`},
		"a page address in use":     {[]string{"--listen-address=127.0.0.1:0", "--kubeconfig=" + kubeconfig, "--ui-listen-address=" + taken.Addr().String()}, "--ui-listen-address: listen tcp"},
		"a client CA alone":         {[]string{"--client-ca-file=x"}, "--client-ca-file needs --tls-cert-file and --tls-key-file"},
		"no such certificate":       {[]string{"--listen-address=127.0.0.1:0", "--tls-cert-file=/no/cert", "--tls-key-file=/no/key"}, "open /no/cert: no such file"},
		"no kubeconfig":             {[]string{"--listen-address=127.0.0.1:0"}, "--kubeconfig is not set, and the pod's service account can't be used"},
		"no such kubeconfig":        {[]string{"--listen-address=127.0.0.1:0", "--kubeconfig=/no/config"}, "--kubeconfig: stat /no/config: no such file"},
		"a nonsense kubeconfig":     {[]string{"--listen-address=127.0.0.1:0", "--kubeconfig=" + nonsense}, "--kubeconfig: error loading config file"},
		"no health address":         {[]string{"--listen-address=127.0.0.1:0", "--health-address=nowhere", "--kubeconfig=" + kubeconfig}, "--health-address: listen tcp: address nowhere: missing port"},
		"no such address":           {[]string{"--listen-address=nowhere", "--kubeconfig=" + kubeconfig}, "--listen-address: listen tcp: address nowhere: missing port"},
		"an address in use":         {[]string{"--listen-address=" + taken.Addr().String(), "--kubeconfig=" + kubeconfig}, "address already in use"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			cmd := command(ctx, test.args...)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run() // ProcessState has the result.
			if code := cmd.ProcessState.ExitCode(); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
			last := lines[len(lines)-1]
			if !strings.HasPrefix(last, "gpushare-extender: ") || !strings.Contains(last, test.want) {
				t.Errorf("stderr %q, want %q", stderr.String(), test.want)
			}
			if stdout.Len() > 0 {
				t.Errorf("stdout %q, want none", stdout.String())
			}
		})
	}
}

func TestCheckSchedulerConfig(t *testing.T) {
	shipped, err := os.ReadFile("../../config/scheduler-config.yaml")
	check.Must(t, err)
	const shippedURL = "http://127.0.0.1:12345/gpushare-scheduler"
	// withCertificate returns what replaces shippedURL: https, and kube-scheduler's certificate in a file.
	withCertificate := func(name string, ends time.Time) string {
		return "https://127.0.0.1:12345/gpushare-scheduler\n    tlsConfig: {caFile: none, keyFile: none, certFile: " + certificateFile(t, name, ends) + "}"
	}
	past, future := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), time.Now().Add(time.Hour)
	for name, test := range map[string]struct {
		old, new       string
		args, env      []string
		stdout, stderr string
		// lines is the number of lines of stdout; 0 for at most one.
		lines int
	}{
		"as shipped": {},
		"a warning":  {old: "weight: 100", new: "weight: 1", stdout: "warning: extenders[0].weight: 1: kube-scheduler's own scores"},
		"an error": {
			old: "ignorable: false", new: "ignorable: true", stdout: "error: extenders[0].ignorable: true: while",
			stderr: "gpushare-extender: standard input: 1 of the findings must be corrected\n",
		},
		"the port of the web page": {
			old: "127.0.0.1:12345", new: "127.0.0.1:12346", stdout: "error: extenders[0].urlPrefix: http://127.0.0.1:12346/gpushare-scheduler: 12346 is the port of the web page",
			stderr: "gpushare-extender: standard input: 1 of the findings must be corrected\n",
		},
		"the extender's flags": {
			args: []string{"--gang-hold=11s"}, stdout: "error: extenders[0].httpTimeout: 15s is not more than the sum of --gang-hold and --bind-timeout, 11s and 4s",
			stderr: "gpushare-extender: standard input: 1 of the findings must be corrected\n",
		},
		"a proxy in the environment": {
			old: "127.0.0.1", new: "10.96.0.15", env: []string{"HTTP_PROXY=http://user:secret@proxy.example.com:3128"},
			stdout: "warning: extenders[0].urlPrefix: this shell's environment has the proxy http://user:xxxxx@proxy.example.com:3128 for it.", lines: 2,
		},
		"a certificate": {old: shippedURL, new: withCertificate("kube-scheduler", future)},
		"an expired certificate": {
			old: shippedURL, new: withCertificate("kube-scheduler", past),
			stdout: "error: extenders[0].tlsConfig.certFile: the certificate expired at 2026-01-01T00:00:00Z: no call between kube-scheduler and extender succeeds",
			stderr: "gpushare-extender: standard input: 1 of the findings must be corrected\n",
		},
		"a certificate with another common name": {
			old: shippedURL, new: withCertificate("system:kube-scheduler", future),
			stdout: `error: extenders[0].tlsConfig.certFile: the certificate has the common name "system:kube-scheduler", and the extender's --client-names allows kube-scheduler:`,
			stderr: "gpushare-extender: standard input: 1 of the findings must be corrected\n",
		},
		"the same common name, which the extender allows": {
			old: shippedURL, new: withCertificate("system:kube-scheduler", future), args: []string{"--client-names=system:kube-scheduler"},
		},
		"an invalid file":    {old: "ignorable: false", new: "ignorant: false", stderr: "gpushare-extender: standard input: strict decoding error: unknown field \"extenders[0].ignorant\"\n"},
		"negative gang hold": {args: []string{"--gang-hold=-1s"}, stderr: "gpushare-extender: --bind-timeout and --gang-hold must be between 0 and 1h0m0s\n"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := command(t.Context(), append([]string{"check-scheduler-config", "-"}, test.args...)...)
			var stdout, stderr strings.Builder
			cmd.Stdin = strings.NewReader(strings.Replace(string(shipped), test.old, test.new, 1))
			cmd.Env = append(cmd.Environ(), test.env...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if failed := err != nil; failed != (test.stderr != "") || failed && cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("exit: %v", err)
			}
			if !strings.HasPrefix(stdout.String(), test.stdout) || strings.Count(stdout.String(), "\n") > max(test.lines, 1) || test.stdout == "" && stdout.Len() > 0 {
				t.Errorf("stdout %q, want %q", stdout.String(), test.stdout)
			}
			if stderr.String() != test.stderr {
				t.Errorf("stderr %q, want %q", stderr.String(), test.stderr)
			}
		})
	}
	if out, err := command(t.Context(), "check-scheduler-config", "../../config/scheduler-config.yaml").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("the file itself: %v: %s", err, out)
	}
	if out, err := command(t.Context(), "check-scheduler-config").CombinedOutput(); err == nil || !strings.Contains(string(out), "accepts 1 arg(s), received 0") {
		t.Errorf("without a file: %v: %s", err, out)
	}
}

// certificateFile writes a self-signed certificate without its key, and returns the path.
func certificateFile(t *testing.T, name string, ends time.Time) string {
	t.Helper()
	public, key, err := ed25519.GenerateKey(nil)
	check.Must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: ends.Add(-24 * time.Hour), NotAfter: ends}
	certificate, err := x509.CreateCertificate(nil, template, template, public, key)
	check.Must(t, err)
	path := filepath.Join(t.TempDir(), "tls.crt")
	check.Must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}), 0o600))
	return path
}

func TestHelpAndVersion(t *testing.T) {
	for flag, want := range map[string][]string{
		"--help":    {"--kubeconfig file", "--listen-address address", "--client-ca-file file", "--bind-timeout", "-v, --v", "aliyun.com/gpu-mem"},
		"--version": {"gpushare-extender version v"},
	} {
		out, err := command(t.Context(), flag).Output()
		if err != nil {
			t.Errorf("%s: %v", flag, err)
		}
		for _, text := range want {
			if !strings.Contains(string(out), text) {
				t.Errorf("%s lacks %q:\n%s", flag, text, out)
			}
		}
	}
	programtest.CheckHelp(t, newCommand().Flags())
}

// TestJSONLogs checks that every log line is one JSON object, also those of libraries.
func TestJSONLogs(t *testing.T) {
	p := startExtender(t, 1, "--logging-format=json", "--ui-listen-address=")
	check.Must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	for line := range strings.Lines(p.wait()) {
		var anything struct{ Msg string }
		if err := json.Unmarshal([]byte(line), &anything); err != nil || anything.Msg == "" {
			t.Errorf("%v: %s", err, line)
		}
	}
}

// The line with the reason why the program ended is JSON too, even if it failed before it started.
func TestJSONErrors(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"a flag's value":  {[]string{"--bind-timeout=0s"}, "--bind-timeout must be positive"},
		"an unknown flag": {[]string{"--no-such-flag"}, "unknown flag: --no-such-flag"},
		"the start":       {[]string{"-v=4", "--listen-address=127.0.0.1:0", "--kubeconfig=/no/config"}, "--kubeconfig: stat /no/config"},
	} {
		out, err := command(t.Context(), append([]string{"--logging-format=json"}, test.args...)...).CombinedOutput()
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		var last struct{ Err string }
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || !strings.Contains(last.Err, test.want) {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

// TestLife runs the extender from start to end: it waits for an API server that isn't reachable and reports the reason, is
// ready once the server is, and exits with status 0 on SIGTERM, even with open connections.
func TestLife(t *testing.T) {
	var up atomic.Bool
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !up.Load():
			http.Error(w, "not there yet", http.StatusServiceUnavailable)
		case r.URL.Query().Get("watch") != "" && r.URL.Query().Get("sendInitialEvents") != "":
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnprocessableEntity) // A server without streaming lists: the client lists.
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
		case r.URL.Query().Get("watch") != "":
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case r.URL.Path == "/api/v1/pods":
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
		case r.URL.Path == "/api/v1/nodes":
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"n1"},
				"status":{"capacity":{"aliyun.com/gpu-mem":"32","aliyun.com/gpu-count":"2"}}}]}`)
		default:
			http.NotFound(w, r)
		}
	}))
	defer api.Close()

	p := startExtender(t, 1, "--ui-listen-address=", "--kubeconfig="+writeKubeconfig(t, api.URL), "--bind-timeout=1m")
	get := func(path string) (int, string) {
		t.Helper()
		code, body, err := get(http.DefaultClient, "http://"+p.verbs+path)
		check.Must(t, err)
		return code, body
	}
	if code, body := get("/readyz"); code != 503 || !strings.Contains(body, "not synced yet") {
		t.Errorf("readyz without an API server: %d %s", code, body)
	}
	if code, _ := get("/livez"); code != 200 {
		t.Errorf("livez without an API server: %d", code)
	}
	up.Store(true)
	await.True(t, "the extender is ready", func() bool {
		code, _ := get("/readyz")
		return code == 200
	})
	if _, body := get("/gpushare-scheduler/inspect"); !strings.Contains(body, `"name":"n1","totalGPU":32,`) {
		t.Errorf("inspect: %s", body)
	}

	// A connection that is opened in advance and never used, as by kube-scheduler's client.
	conn, err := net.Dial("tcp", p.verbs)
	check.Must(t, err)
	defer conn.Close()
	check.Must(t, p.cmd.Process.Signal(syscall.SIGTERM))
	logs := p.wait()
	if !p.cmd.ProcessState.Success() || !strings.Contains(logs, `"Stopped"`) {
		t.Errorf("the process ended with %v:\n%s", p.cmd.ProcessState, logs)
	}
}
