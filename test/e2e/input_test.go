package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/fakenvml"
	"github.com/gpushare/gpushare/test/framework"
)

// What the extender's process answers to what kube-scheduler never sends. Each time the ledger stays as it was.
func TestBadInput(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})
	s := newScene(t, bed)
	n1 := s.at("n1")
	s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
	holder := s.place("holder", 12207)
	waiting := s.create("waiting", 8138, gated)
	s.checkBooks()
	before, err := inspected(t.Context(), bed)
	must(t, err)

	encode := func(v any) string {
		data, err := json.Marshal(v)
		must(t, err)
		return string(data)
	}
	args := func(edit func(*extenderv1.ExtenderArgs)) string {
		a := &extenderv1.ExtenderArgs{Pod: waiting.DeepCopy(), NodeNames: &[]string{n1}}
		edit(a)
		return encode(a)
	}
	binding := func(edit func(*extenderv1.ExtenderBindingArgs)) string {
		a := &extenderv1.ExtenderBindingArgs{PodNamespace: s.name, PodName: "waiting", PodUID: waiting.UID, Node: n1}
		edit(a)
		return encode(a)
	}
	const ok, bad = http.StatusOK, http.StatusBadRequest
	filter, prioritize, bind := "/gpushare-scheduler/filter", "/gpushare-scheduler/prioritize", "/gpushare-scheduler/bind"
	for title, test := range map[string]struct {
		method, path, body string
		status             int
		// want are parts of what the answer says.
		want []string
	}{
		"filter: malformed JSON":         {http.MethodPost, filter, `{"Pod":`, ok, []string{`"Error":"`, "can't be read"}},
		"filter: not an object":          {http.MethodPost, filter, `[1,2]`, ok, []string{`"Error":"`, "can't be read"}},
		"filter: empty body":             {http.MethodPost, filter, ``, ok, []string{`"Error":"the request's body is empty"`}},
		"filter: more than one value":    {http.MethodPost, filter, `{} {}`, ok, []string{`"Error":"`, "after top-level value"}},
		"filter: huge body":              {http.MethodPost, filter, `{"NodeNames":["` + strings.Repeat("x", 17<<20) + `"]}`, ok, []string{`"Error":"`, "over 16777216 bytes"}},
		"filter: deeply nested":          {http.MethodPost, filter, strings.Repeat(`{"Pod":`, 100_000), ok, []string{`"Error":"`, "can't be read"}},
		"filter: no pod":                 {http.MethodPost, filter, `{"NodeNames":["n1"]}`, ok, []string{`"Error":"the request names no pod"`}},
		"filter: a pod without a UID":    {http.MethodPost, filter, args(func(a *extenderv1.ExtenderArgs) { a.Pod.UID = "" }), ok, []string{`"Error":"`, "UID"}},
		"filter: no nodes":               {http.MethodPost, filter, args(func(a *extenderv1.ExtenderArgs) { a.NodeNames = nil }), ok, []string{`"NodeNames":[]`}},
		"filter: an unknown node":        {http.MethodPost, filter, args(func(a *extenderv1.ExtenderArgs) { a.NodeNames = &[]string{"nowhere"} }), ok, []string{`"nowhere":"the node shares no GPU memory"`}},
		"prioritize: malformed JSON":     {http.MethodPost, prioritize, `}`, bad, []string{"can't be read"}},
		"prioritize: no pod":             {http.MethodPost, prioritize, `{}`, bad, []string{"no pod"}},
		"prioritize: an unknown node":    {http.MethodPost, prioritize, args(func(a *extenderv1.ExtenderArgs) { a.NodeNames = &[]string{"nowhere"} }), ok, []string{`"Host":"nowhere","Score":0`}},
		"bind: malformed JSON":           {http.MethodPost, bind, `{"PodName":1}`, ok, []string{`"Error":"`, "can't be read"}},
		"bind: empty body":               {http.MethodPost, bind, ``, ok, []string{`"Error":"`, "empty"}},
		"bind: nothing named":            {http.MethodPost, bind, `{}`, ok, []string{`"Error":"`, "all needed"}},
		"bind: an unknown pod":           {http.MethodPost, bind, binding(func(a *extenderv1.ExtenderBindingArgs) { a.PodName = "nobody" }), ok, []string{`"Error":"`, "nobody", "not found"}},
		"bind: a wrong UID":              {http.MethodPost, bind, binding(func(a *extenderv1.ExtenderBindingArgs) { a.PodUID = "1234" }), ok, []string{`"Error":"`, string(waiting.UID), "not 1234"}},
		"bind: an unknown node":          {http.MethodPost, bind, binding(func(a *extenderv1.ExtenderBindingArgs) { a.Node = "nowhere" }), ok, []string{`"Error":"`, "nowhere", "shares no GPU memory"}},
		"bind: a pod that mayn't be yet": {http.MethodPost, bind, binding(func(*extenderv1.ExtenderBindingArgs) {}), ok, []string{`"Error":"`, "schedulingGates"}},
		"bind: a pod bound elsewhere": {http.MethodPost, bind, binding(func(a *extenderv1.ExtenderBindingArgs) {
			a.PodName, a.PodUID, a.Node = "holder", holder.UID, "nowhere"
		}), ok, []string{`"Error":"`, "bound to node " + n1}},
		"a wrong method":           {http.MethodGet, filter, ``, http.StatusMethodNotAllowed, []string{"Method Not Allowed"}},
		"inspect: a wrong method":  {http.MethodPost, "/gpushare-scheduler/inspect", ``, http.StatusMethodNotAllowed, []string{"Method Not Allowed"}},
		"inspect: an unknown node": {http.MethodGet, "/gpushare-scheduler/inspect/nowhere", ``, http.StatusNotFound, []string{`"error":"`, "nowhere"}},
		"a path that there isn't":  {http.MethodGet, "/gpushare-scheduler/filters", ``, http.StatusNotFound, []string{"no such path"}},
	} {
		t.Run(title, func(t *testing.T) {
			status, answer := request(t, test.method, bed.ExtenderURL+test.path, test.body)
			if status != test.status || !containsAll(answer, test.want) {
				t.Errorf("got status %d and %.300s\nwant status %d and %q", status, answer, test.status, test.want)
			}
			after, err := inspected(t.Context(), bed)
			must(t, err)
			if diff := before.diff(after); diff != "" {
				t.Errorf("the ledger isn't as before:\n%s", diff)
			}
		})
	}
	if !bed.Extender.Running() || s.metric(`gpushare_extender_request_duration_seconds_count{outcome="panic",verb="filter"}`) != 0 {
		t.Error("the extender has panicked")
	}
	s.ungate("waiting")
	s.sits(s.bound("waiting"), n1, 1)
	s.checkBooks()
}

func request(t *testing.T, method, url, body string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	must(t, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	must(t, err)
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	must(t, err)
	return response.StatusCode, string(answer)
}

// Programs that are started wrongly say what is wrong, and end with a status other than 0.
func TestWrongFlags(t *testing.T) {
	for title, test := range map[string]struct {
		program string
		args    []string
		want    []string
	}{
		"extender: an unknown flag":            {extender, []string{"--nonsense"}, []string{"unknown flag", "--nonsense"}},
		"extender: an argument":                {extender, []string{"nonsense"}, []string{"nonsense"}},
		"extender: an unknown policy":          {extender, []string{"--card-policy=worst"}, []string{"--card-policy", "worst"}},
		"extender: a certificate, but no key":  {extender, []string{"--tls-cert-file=x"}, []string{"--tls-cert-file and --tls-key-file must be set together"}},
		"extender: a kubeconfig that isn't":    {extender, []string{"--kubeconfig=/nonexistent"}, []string{"--kubeconfig", "/nonexistent", "no such file"}},
		"extender: neither kubeconfig nor pod": {extender, nil, []string{"--kubeconfig", "service account"}},
		"extender: an address that isn't":      {extender, []string{"--listen-address=nowhere:x"}, []string{"--listen-address", "unknown port"}},
		"plugin: an unknown flag":              {plugin, []string{"--nonsense"}, []string{"unknown flag", "--nonsense"}},
		"plugin: no node name":                 {plugin, []string{"--kubeconfig=/nonexistent"}, []string{"--node-name"}},
		"plugin: a unit that isn't":            {plugin, []string{"--node-name=n1", "--memory-unit=acre"}, []string{"--memory-unit", "acre"}},
		"plugin: a name for cards that isn't":  {plugin, []string{"--node-name=n1", "--visible-devices=colour"}, []string{"--visible-devices", "colour"}},
		"plugin: a kubeconfig that isn't":      {plugin, []string{"--node-name=n1", "--kubeconfig=/nonexistent"}, []string{"/nonexistent"}},
		"inspect: an unknown output":           {inspect, []string{"-o", "xml"}, []string{"--output", "xml"}},
		"inspect: a kubeconfig that isn't":     {inspect, []string{"--kubeconfig=/nonexistent"}, []string{"/nonexistent"}},
	} {
		t.Run(title, func(t *testing.T) {
			p := lonely(t, test.program, test.args...)
			must(t, p.Start(t.Context()))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err := p.Wait(ctx)
			if output := p.Tail(20); err == nil || p.ExitCode() <= 0 || !containsAll(output, test.want) {
				t.Errorf("it ended with status %d (%v) and said\n%s\nwant a status above 0 and %q", p.ExitCode(), err, output, test.want)
			}
		})
	}
}

// Programs to which something is missing that may still come say so and wait for it.
func TestMissing(t *testing.T) {
	library := fakenvml.BuildForTest(t)
	unreachable := kubeconfigFor(t, controlplane.ReservePortForTest(t).URL("https"))

	t.Run("the extender waits for an API server, alive and not ready", func(t *testing.T) {
		port := controlplane.ReservePortForTest(t)
		p := lonely(t, extender, "--kubeconfig="+unreachable, "--listen-address="+port.Address())
		p.Ready = controlplane.HTTPReady(port.URL("http") + "/livez")
		controlplane.RunForTest(t, p)
		for path, want := range map[string]string{
			"/readyz":                     "the ledger is still being rebuilt from the API server",
			"/gpushare-scheduler/inspect": "the ledger is still being rebuilt from the API server",
		} {
			if status, answer := request(t, http.MethodGet, port.URL("http")+path, ""); status != http.StatusServiceUnavailable || !strings.Contains(answer, want) {
				t.Errorf("%s answers %d, %q", path, status, answer)
			}
		}
		body := `{"Pod":{"metadata":{"name":"a","namespace":"b","uid":"c"},"spec":{"containers":[{"resources":{"limits":{"aliyun.com/gpu-mem":"1"}}}]}},"NodeNames":["n1"]}`
		if status, answer := request(t, http.MethodPost, port.URL("http")+"/gpushare-scheduler/filter", body); status != http.StatusOK || !strings.Contains(answer, "still being rebuilt") {
			t.Errorf("filter answers %d, %q", status, answer)
		}
		says(t, p, "connection refused")
		endsInTime(t, p)
	})

	withoutLibrary := func(t *testing.T) []string {
		return []string{"--nvml-library=" + filepath.Join(t.TempDir(), "none.so")}
	}
	for title, test := range map[string]struct {
		cards []fakenvml.Card
		args  func(t *testing.T) []string
		want  []string
	}{
		"the device plugin waits for a driver library": {nil, withoutLibrary, []string{"none.so"}},
		"the device plugin waits for cards":            {[]fakenvml.Card{}, func(*testing.T) []string { return []string{"--nvml-library=" + library} }, []string{"the driver reports no cards"}},
		"the device plugin waits for an API server": {
			[]fakenvml.Card{{UUID: "GPU-1", Model: "Tesla T4", MiB: cardMiB}},
			func(*testing.T) []string { return []string{"--nvml-library=" + library} }, []string{"Waiting for the API server", "connection refused"},
		},
	} {
		t.Run(title, func(t *testing.T) {
			machine := fakenvml.NewMachine(t.TempDir())
			must(t, machine.SetCards(test.cards...))
			p := lonely(t, plugin, append(test.args(t), "--kubeconfig="+unreachable, "--node-name=n1", "--listen-address=",
				"--device-plugin-dir="+shortDir(t), "--pod-resources-socket="+filepath.Join(shortDir(t), "none.sock"))...)
			p.Env = machine.Env()
			controlplane.RunForTest(t, p)
			says(t, p, test.want...)
			endsInTime(t, p)
		})
	}
}

const (
	extender = "gpushare-extender"
	plugin   = "gpushare-device-plugin"
	inspect  = "kubectl-inspect-gpushare"
)

// lonely describes a program that runs outside of any bed.
func lonely(t *testing.T, program string, args ...string) *controlplane.Process {
	t.Helper()
	root, err := controlplane.RepositoryRoot()
	must(t, err)
	path := filepath.Join(root, "bin", program)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv(controlplane.RequireEnv) != "" {
			t.Fatal(err)
		}
		t.Skipf("%v: `make build` builds it", err)
	}
	return &controlplane.Process{Name: program, Path: path, Args: args, LogPath: filepath.Join(t.TempDir(), "log")}
}

// shortDir is a folder whose path leaves room for the name of a Unix socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gs")
	must(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// says waits until a program has said something, in one line.
func says(t *testing.T, p *controlplane.Process, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s says %q", p.Name, want), func(context.Context) error {
		output := p.Tail(1000)
		for line := range strings.Lines(output) {
			if containsAll(line, want) {
				return nil
			}
		}
		return fmt.Errorf("it said\n%s", output)
	})
}

// endsInTime checks that a program is still there, and ends as it should when it is asked to.
func endsInTime(t *testing.T, p *controlplane.Process) {
	t.Helper()
	if !p.Running() {
		t.Fatalf("%s has ended\n%s", p.Name, p.Tail(20))
	}
	terminate(t, p)
}

func kubeconfigFor(t *testing.T, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(path, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {token: t}}]
`, server), 0o600))
	return path
}

// Many connections at once, of which some say nothing, some send slowly, and some send as much as they can: pods are bound
// all the same, and the process stays the one that it was.
func TestFlood(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})
	s := newScene(t, bed)
	s.addNodes(controlplane.Node{Name: "n1", Cards: mebibytes(cardMiB, cardMiB)})
	before := bed.Extender.Pid()
	address := strings.TrimPrefix(bed.ExtenderURL, "http://")

	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	var sent atomic.Int64
	// each runs on connections of its own, again and again.
	flood := func(connections int, each func(conn net.Conn)) {
		for range connections {
			clients.Go(func() {
				for ctx.Err() == nil {
					conn, err := net.Dial("tcp", address)
					if err != nil {
						continue
					}
					hangUp := context.AfterFunc(ctx, func() { conn.Close() })
					each(conn)
					sent.Add(1)
					hangUp()
					conn.Close()
				}
			})
		}
	}
	head := "POST /gpushare-scheduler/filter HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16777216\r\n\r\n\""
	silence := func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }
	chunk := strings.Repeat("x", 1<<20)
	flood(200, silence)
	flood(50, func(conn net.Conn) { // Sends less than it announced, and waits.
		_, _ = io.WriteString(conn, head+chunk)
		silence(conn)
	})
	flood(4, func(conn net.Conn) { // Sends as fast as it can.
		_, err := io.WriteString(conn, head)
		for range 16 {
			if err == nil {
				_, err = io.WriteString(conn, chunk)
			}
		}
	})
	flood(4, func(conn net.Conn) { // What isn't HTTP at all.
		_, _ = io.WriteString(conn, "\x16\x03\x01 hello\r\n\r\n")
		silence(conn)
	})

	for i := range controlplane.Times(5, 50) {
		name := fmt.Sprintf("pod-%d", i)
		s.place(name, 512)
		must(t, s.delete(name, 0))
	}
	stop()
	clients.Wait()
	eventually(t, "the extender answers as before", func(context.Context) error {
		status, text := request(t, http.MethodGet, bed.ExtenderURL+"/readyz", "")
		if status != http.StatusOK {
			return fmt.Errorf("status %d: %s", status, text)
		}
		return nil
	})
	if after := bed.Extender.Pid(); after != before || !bed.Extender.Running() {
		t.Errorf("the extender is process %d, was %d", after, before)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", before))
	must(t, err)
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "VmHWM") {
			t.Logf("%d connections ended; the extender's most memory: %s", sent.Load(), strings.TrimSpace(line))
		}
	}
	s.checkBooks()
}
