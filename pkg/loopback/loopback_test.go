package loopback

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gpushare/gpushare/test/check"
)

func TestHandler(t *testing.T) {
	const onLoopback, elsewhere = "127.0.0.1:12346", "0.0.0.0:8080"
	for name, test := range map[string]struct {
		address, host string
		want          int
	}{
		"a forwarded port":              {onLoopback, "localhost:8001", 200},
		"a port of the protocol":        {onLoopback, "localhost", 200},
		"capitals":                      {onLoopback, "LocalHost:12346", 200},
		"kube-scheduler":                {onLoopback, "127.0.0.1:12345", 200},
		"an address without a port":     {onLoopback, "127.0.0.2", 200},
		"IPv6":                          {"[::1]:12346", "[::1]:12346", 200},
		"IPv6 without a port":           {"[::1]:12346", "[::1]", 200},
		"IPv4 within IPv6":              {"[::1]:12346", "[::ffff:127.0.0.1]:12346", 200},
		"the name of a site":            {onLoopback, "rebound.example.com:12346", 403},
		"a name that begins like it":    {onLoopback, "localhost.example.com", 403},
		"a name that begins like an IP": {onLoopback, "127.0.0.1.example.com:12346", 403},
		"a name below localhost":        {onLoopback, "a.localhost:12346", 403},
		"an address of another host":    {onLoopback, "192.0.2.1:12346", 403},
		"the unspecified address":       {onLoopback, "0.0.0.0:12346", 403},
		"no Host":                       {onLoopback, "", 403},
		"a site, on IPv6":               {"[::1]:12346", "rebound.example.com", 403},
		"a Service's name, on all":      {elsewhere, "gpushare.kube-system.svc:8080", 200},
		"localhost, on all":             {elsewhere, "localhost:8080", 200},
		"an ingress, on the pod's own":  {"192.0.2.7:8080", "gpus.example.com", 200},
		"an ingress, on all, with IPv6": {"[::]:8080", "gpus.example.com", 200},
	} {
		t.Run(name, func(t *testing.T) {
			address, err := net.ResolveTCPAddr("tcp", test.address)
			check.Must(t, err)
			request, answer := httptest.NewRequest(http.MethodGet, "/", nil), httptest.NewRecorder()
			request.Host = test.host
			Handler(address, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(answer, request)
			if answer.Code != test.want || (test.want == 403) != strings.Contains(answer.Body.String(), "answers only requests for localhost") {
				t.Errorf("status %d, want %d: %s", answer.Code, test.want, answer.Body)
			}
		})
	}
}
