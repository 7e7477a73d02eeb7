package extender

import (
	"fmt"
	"net/http"

	"github.com/julienschmidt/httprouter"

	"github.com/gpushare/gpushare/pkg/version"
)

// livez reports that the process answers. If the API server is unreachable, killing the extender doesn't help.
func livez(w http.ResponseWriter, _ *http.Request, _ httprouter.Params) { fmt.Fprintln(w, "ok") }

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request, _ httprouter.Params) {
	if err := s.Scheduler.Ready(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

func getVersion(w http.ResponseWriter, r *http.Request, _ httprouter.Params) {
	write(w, r, http.StatusOK, version.Get())
}
