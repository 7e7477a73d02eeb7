package deviceplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/loopback"
	"github.com/gpushare/gpushare/pkg/usage"
)

// containerSource provides the node's running containers, with what each was given.
type containerSource struct {
	pods   *podSource
	record *allocation.Record
	cards  *cardState
}

// Containers returns the running containers, also those that ask for no GPU memory.
func (s containerSource) Containers() []usage.Container {
	given, unit := s.record.Snapshot(), s.cards.Get().Unit
	var out []usage.Container
	for _, object := range s.pods.informer.GetStore().List() {
		info, ok := object.(*podInfo)
		if !ok {
			continue
		}
		for name, id := range info.instances {
			c := usage.Container{
				Namespace: info.Namespace, Pod: info.Name, UID: info.pod.UID, Name: name,
				ID: id[strings.LastIndexByte(id, '/')+1:], // The status has it as RUNTIME://ID.
			}
			if a := given[info.pod.UID][name]; a.HasCard() {
				c.Cards = a.Cards.Cards()
				c.Requested = unit.Bytes(a.Cards[0].Memory)
				c.Limit, c.Allowed = a.Limit, a.Allowed
			}
			out = append(out, c)
		}
	}
	return out
}

// Measure measures the use of the cards, checks the limits of containers, and finds those above their request. It must be called
// regularly, and from one goroutine at a time.
//
// Until SetCards has set cards it only asks which cards can be limited. The pods and what they were given are known by then too
// (KnownCards); before, a measurement would show that no pod uses memory, and the reports of an earlier plugin would be withdrawn.
func (p *Plugin) Measure(driver Driver) {
	p.isolator.Ask(driver)
	if len(p.cards.Get().Cards) == 0 {
		return
	}
	p.meter.Measure(driver)
	report := p.meter.Report()
	p.limits.Update(report)
	p.overuse.Update(report, p.allocator.InUse())
}

// usageHandler returns the handler for the measured use.
func (p *Plugin) usageHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /usage", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p.meter.Report()) // The client may have disconnected.
	})
	return mux
}

// listenLoopback opens the address of the measured use, which names tenants' pods. It must be a loopback address: `kubectl
// port-forward` reaches it, with the API server's authorization, and other pods don't. It returns nil if the address is empty.
func listenLoopback(ctx context.Context, address string) (net.Listener, error) {
	listener, err := listen(ctx, address)
	if listener == nil || err != nil {
		return nil, err
	}
	if !loopback.Is(listener.Addr()) {
		_ = listener.Close()
		return nil, fmt.Errorf("listening on %s: it is not a loopback address", address)
	}
	return listener, nil
}
