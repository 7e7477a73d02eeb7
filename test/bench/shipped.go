package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpushare/gpushare/pkg/webui"
	"github.com/gpushare/gpushare/test/controlplane"
)

// Names of the chart's objects.
const (
	namespace      = metav1.NamespaceSystem
	extenderName   = "gpushare-extender" // Deployment, ServiceAccount, Service and EndpointSlice.
	extenderSecret = "gpushare-extender-tls"
	configSecret   = "gpushare-scheduler-config"
)

// startShipped installs the chart with its default values but for those given as NAME=VALUE, and runs the extender's replicas
// with the arguments of the Deployment and further ones, and the certificates of the Secrets. kube-scheduler gets the chart's
// configuration with the leader's address in place of the Service's: kube-proxy forwards in the kernel, and a proxy in this process
// would cost more.
func (s *bench) startShipped(values, args []string) func(context.Context) (running, error) {
	return func(ctx context.Context) (running, error) { return s.serveShipped(ctx, values, args) }
}

func (s *bench) serveShipped(ctx context.Context, values, args []string) (running, error) {
	root, err := controlplane.RepositoryRoot()
	if err != nil {
		return running{}, err
	}
	install := []string{"install", "gpushare", filepath.Join(root, "deploy", "helm", "gpushare"),
		"--take-ownership", "--force-conflicts"} // Other kinds have applied some of the same objects.
	for _, value := range values {
		install = append(install, "--set="+value)
	}
	if err := s.helm(ctx, install...); err != nil {
		return running{}, err
	}
	deployment, err := s.plane.Client.AppsV1().Deployments(namespace).Get(ctx, extenderName, metav1.GetOptions{})
	if err != nil {
		return running{}, err
	}
	certificates, err := s.writeSecret(ctx, extenderSecret)
	if err != nil {
		return running{}, err
	}
	config, err := s.writeSecret(ctx, configSecret)
	if err != nil {
		return running{}, err
	}
	container := deployment.Spec.Template.Spec.Containers[0]
	replicas, ready, err := s.startReplicas(ctx, root, int(*deployment.Spec.Replicas), append(container.Args, args...), certificates)
	if err != nil {
		return running{}, err
	}
	leader, err := s.awaitLeader(ctx, replicas)
	if err != nil {
		return running{}, err
	}
	browser, err := pageClient(certificates)
	if err != nil {
		return running{}, err
	}
	readers, stopReading := context.WithCancel(context.WithoutCancel(ctx))
	for _, r := range replicas {
		go r.scrape(readers)
	}
	go leader.view(readers, browser)
	return running{
		url: leader.url, ready: ready, schedulerConfig: filepath.Join(config, "scheduler-config.yaml"),
		finish: func(ctx context.Context, t *result) error {
			stopReading()
			return s.finishShipped(ctx, replicas, t)
		},
	}, nil
}

// startReplicas starts the extenders, one after another. ready is how long the slowest took until it was ready.
func (s *bench) startReplicas(ctx context.Context, root string, n int, args []string, certificates string) (replicas []*replica, ready time.Duration, err error) {
	kubeconfig, err := s.plane.ServiceAccountKubeconfig(ctx, namespace, extenderName)
	if err != nil {
		return nil, 0, err
	}
	for i := range n {
		r, err := newReplica(i, args, certificates)
		if err != nil {
			return nil, 0, err
		}
		r.process = &controlplane.Process{
			Name: r.name, Path: filepath.Join(root, "bin", "gpushare-extender"),
			Args:    append(r.args, "--kubeconfig="+kubeconfig),
			LogPath: filepath.Join(s.dir, r.name+".log"),
			Ready:   controlplane.HTTPReady(r.health + "/readyz"),
		}
		start := time.Now()
		if err := r.process.Start(ctx); err != nil {
			return nil, 0, err
		}
		ready = max(ready, time.Since(start))
		replicas = append(replicas, r)
	}
	return replicas, ready, nil
}

// finishShipped adds the metrics of all replicas to the result, stops them and uninstalls the chart.
func (s *bench) finishShipped(ctx context.Context, replicas []*replica, t *result) error {
	var errs []error
	for _, r := range replicas {
		errs = append(errs, readMetrics(ctx, r.health, t), r.process.Kill())
		for _, port := range r.ports {
			port.Release()
		}
	}
	errs = append(errs, s.helm(ctx, "uninstall", "gpushare"))
	// Without a controller manager nothing deletes the EndpointSlice with its Service.
	err := s.plane.Client.DiscoveryV1().EndpointSlices(namespace).Delete(ctx, extenderName, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// helm runs the pinned helm on the control plane.
func (s *bench) helm(ctx context.Context, args ...string) error {
	path, err := controlplane.Tool(ctx, "helm")
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, path, append(args, "--namespace="+namespace)...)
	command.Env = append(os.Environ(), "HOME="+s.dir, "KUBECONFIG="+s.plane.KubeconfigPath)
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("helm %s: %w: %s", args[0], err, out)
	}
	return nil
}

// writeSecret writes a Secret's content as the kubelet mounts it, and returns the folder.
func (s *bench) writeSecret(ctx context.Context, name string) (dir string, err error) {
	secret, err := s.plane.Client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	dir = filepath.Join(s.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	for key, data := range secret.Data {
		if err := os.WriteFile(filepath.Join(dir, key), data, 0o600); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// awaitLeader waits until the EndpointSlice names a replica, and returns that replica.
func (s *bench) awaitLeader(ctx context.Context, replicas []*replica) (leader *replica, err error) {
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		slice, err := s.plane.Client.DiscoveryV1().EndpointSlices(namespace).Get(ctx, extenderName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		if err != nil || len(slice.Endpoints) == 0 {
			return false, err
		}
		at := slices.IndexFunc(replicas, func(r *replica) bool { return r.advertised == slice.Endpoints[0].Addresses[0] })
		if at >= 0 {
			leader = replicas[at]
		}
		return at >= 0, nil
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for a leader: %w", err)
	}
	return leader, nil
}

// replica is one pod of the extender, run as a process.
type replica struct {
	name string
	args []string
	// advertised is the address in the EndpointSlice. The API server rejects loopback addresses there, so this is one
	// for documentation (RFC 5737). It is never connected to.
	advertised string
	// url is the address for kube-scheduler, health that of probes and metrics, page that of the web page.
	url, health, page string
	ports             []*controlplane.Port
	process           *controlplane.Process
}

// newReplica translates a container's arguments to this machine: each listen address becomes a free port on loopback,
// and the mounted Secret becomes the folder certificates.
func newReplica(i int, args []string, certificates string) (*replica, error) {
	r := &replica{name: fmt.Sprintf("%s-%d", extenderName, i), advertised: fmt.Sprintf("192.0.2.%d", i+1)}
	for _, arg := range args {
		flag, value, _ := strings.Cut(arg, "=")
		switch {
		case flag == "--advertise-address":
			arg = flag + "=" + r.advertised
		case strings.HasSuffix(flag, "-address"):
			port, err := controlplane.ReservePort()
			if err != nil {
				return nil, err
			}
			r.ports = append(r.ports, port)
			arg = flag + "=" + port.Address()
			switch flag {
			case "--listen-address":
				r.url = port.URL("https")
			case "--health-address":
				r.health = port.URL("http")
			case "--ui-listen-address":
				r.page = port.URL("https")
			}
		case strings.HasPrefix(value, "/tls/"):
			arg = flag + "=" + filepath.Join(certificates, strings.TrimPrefix(value, "/tls/"))
		}
		r.args = append(r.args, arg)
	}
	if r.page == "" { // On its default port, which the replicas would share here.
		page, err := controlplane.ReservePort()
		if err != nil {
			return nil, err
		}
		r.ports, r.page = append(r.ports, page), page.URL("https")
		r.args = append(r.args, "--ui-listen-address="+page.Address())
	}
	if r.url == "" || r.health == "" {
		return nil, fmt.Errorf("the Deployment has no --listen-address or no --health-address: %q", args)
	}
	return r, nil
}

// scrapeInterval is that of the chart's monitors.
const scrapeInterval = 30 * time.Second

// scrape reads the replica's metrics until ctx ends.
func (r *replica) scrape(ctx context.Context) {
	for ; ctx.Err() == nil; sleep(ctx, scrapeInterval) {
		_, _ = readAll(ctx, http.DefaultClient, r.health+"/metrics") // readMetrics reports errors at the end.
	}
}

// view reads what an open web page reads, until ctx ends.
func (r *replica) view(ctx context.Context, browser *http.Client) {
	var state struct{ Revision string }
	for ; ctx.Err() == nil; sleep(ctx, time.Second) {
		text, err := readAll(ctx, browser, r.page+webui.Path+"/data.json?since="+state.Revision)
		if err == nil && len(text) > 0 { // Else nothing has changed.
			err = json.Unmarshal(text, &state)
		}
		if err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "bench: the page:", err)
		}
	}
}

// pageClient returns a client that trusts the chart's CA, for the page.
func pageClient(certificates string) (*http.Client, error) {
	ca, err := os.ReadFile(filepath.Join(certificates, "ca.crt"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	name := extenderName + "." + namespace + ".svc"
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: name}}}, nil
}

// readAll reads an answer to its end, compressed as a browser requests it.
func readAll(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusNoContent {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	return io.ReadAll(response.Body)
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
