package inspect

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// output collects what a command writes. It can be read while the command runs.
type output struct {
	mu      sync.Mutex
	text    bytes.Buffer  // Guarded by mu.
	written chan struct{} // Closed at the next write. Guarded by mu.
}

func newOutput() *output { return &output{written: make(chan struct{})} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.written)
	o.written = make(chan struct{})
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// waitFor waits until the condition is true for the whole output.
func (o *output) waitFor(t *testing.T, what string, condition func(string) bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		o.mu.Lock()
		text, written := o.text.String(), o.written
		o.mu.Unlock()
		if condition(text) {
			return
		}
		select {
		case <-written:
		case <-deadline:
			t.Fatalf("no %s within 30 s; written so far:\n%s", what, text)
		}
	}
}

// execute runs the command against the API until it ends.
func execute(t *testing.T, api *fakeAPI, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	out, errOut := newOutput(), newOutput()
	err = start(t.Context(), t, api, out, errOut, args...)()
	return out.String(), errOut.String(), err
}

// start runs the command and returns a function that waits for its end.
func start(ctx context.Context, t *testing.T, api *fakeAPI, out, errOut io.Writer, args ...string) func() error {
	t.Helper()
	cmd := newCommand(genericiooptions.IOStreams{In: strings.NewReader(""), Out: out, ErrOut: errOut}, "v1.2.3", time.Millisecond)
	cmd.SetArgs(append(args, "--kubeconfig", writeKubeconfig(t, api.URL)))
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	return func() error {
		t.Helper()
		return await.Receive(t, "the end of the command", ended)
	}
}

func writeKubeconfig(t *testing.T, server string) string {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion":"v1","kind":"Config","current-context":"test",` +
		`"clusters":[{"name":"test","cluster":{"server":"` + server + `"}}],` +
		`"users":[{"name":"test","user":{}}],` +
		`"contexts":[{"name":"test","context":{"cluster":"test","user":"test","namespace":"of-the-context"}}]}`
	check.Must(t, os.WriteFile(kubeconfig, []byte(config), 0o600))
	return kubeconfig
}
