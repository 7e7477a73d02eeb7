package extender

import (
	"fmt"
	"net/http"

	"github.com/julienschmidt/httprouter"

	"github.com/gpushare/gpushare/pkg/version"
)

// livez says that the process answers. An API server that is gone is no reason to kill an extender.
func livez(w http.ResponseWriter, _ *http.Request, _ httprouter.Params) { fmt.Fprintln(w, "ok") }

// readyz says whether the ledger stands.
func (s *Server) readyz(w http.ResponseWriter, _ *http.Request, _ httprouter.Params) {
	if err := s.Cluster.Ready(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

func getVersion(w http.ResponseWriter, r *http.Request, _ httprouter.Params) {
	write(w, r, http.StatusOK, version.Get())
}
