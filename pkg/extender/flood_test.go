package extender

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

// Bodies that are on their way count too: whoever sends a lot and never ends can't fill the memory, and what they took is
// free again once they are gone.
func TestAFloodOfLargeRequests(t *testing.T) {
	f := start(t, newNode(t, "n1", 100))
	server := NewServer(f.options(f.cluster))
	const half = 600 << 10
	body := text(t, extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: names("n1")})
	// Room for half of two large ones, and half of a small one.
	server.bodies.limit = int64(2*half + len(body)/2)
	s := serve(t, server)
	ask := func() string {
		response, err := http.Post("http://"+s.address+Prefix+"/filter", "application/json", strings.NewReader(body))
		if err != nil {
			return err.Error()
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			return err.Error()
		}
		return string(answer)
	}
	if got := ask(); !strings.Contains(got, `"NodeNames":["n1"]`) {
		t.Fatalf("before: %s", got)
	}

	flood := fmt.Sprintf("POST %s/filter HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n\"%s", Prefix, 2*half, strings.Repeat("x", half-1))
	first, second := s.dial(t, flood), s.dial(t, flood)
	await(t, "the flood is noticed", func() bool { return strings.Contains(ask(), "too many large requests at once") })
	if got := get(t, http.DefaultClient, "http://"+s.address+"/livez"); got != "ok\n" {
		t.Errorf("livez under the flood: %s", got)
	}
	first.Close()
	second.Close()
	await(t, "an answer after the flood", func() bool { return strings.Contains(ask(), `"NodeNames":["n1"]`) })
	await(t, "nothing is counted any more", func() bool { return server.bodies.read.Load() == 0 })
}
