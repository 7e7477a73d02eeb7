package framework

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/test/controlplane"
)

// startReplicas starts several extenders with leader election, and a service that forwards to the leader.
func (c *Cluster) startReplicas(ctx context.Context) error {
	if err := c.Apply(ctx, c.Manifests("replicas", c.options.EarlierVersion)); err != nil {
		return err
	}
	kubeconfig, err := c.ServiceAccountKubeconfig(ctx, "kube-system", "gpushare-extender")
	if err != nil {
		return err
	}
	if kubeconfig, err = c.throughProxy(kubeconfig); err != nil {
		return err
	}
	for i := range c.options.Replicas {
		port, err := controlplane.ReservePort()
		if err != nil {
			return err
		}
		c.replicaPorts = append(c.replicaPorts, port)
		name := "gpushare-extender-" + strconv.Itoa(i)
		replica := &controlplane.Process{
			Name: name, Path: c.ExtenderBinary(c.options.EarlierVersion),
			Args: append([]string{
				"--kubeconfig=" + kubeconfig, "--listen-address=" + port.Address(), "--ui-listen-address=127.0.0.1:0", "-v=2", "--leader-elect",
				// The API server rejects loopback addresses in an EndpointSlice. This one is for documentation (RFC
				// 5737); the service below uses only the port.
				"--advertise-address=192.0.2." + strconv.Itoa(i+1),
			}, c.options.ExtenderArgs...),
			LogPath: filepath.Join(c.options.Dir, name+".log"),
			Ready:   controlplane.HTTPReady(port.URL("http") + "/readyz"),
		}
		c.Replicas = append(c.Replicas, replica)
		c.ReplicaURLs = append(c.ReplicaURLs, port.URL("http"))
		if err := replica.Start(ctx); err != nil {
			return err
		}
	}
	c.service, err = startService(c.port.Address(), c.Client)
	return err
}

// Leader returns the index of the replica that the EndpointSlice names, or -1.
func (c *Cluster) Leader(ctx context.Context) int {
	address, err := published(ctx, c.Client)
	if err != nil {
		return -1
	}
	for i, port := range c.replicaPorts {
		if port.Address() == address {
			return i
		}
	}
	return -1
}

// service stands for kube-proxy: it forwards connections to the address in the Service's EndpointSlice. It reads the
// EndpointSlice for each connection, and closes the connection if it names no address.
type service struct {
	listener net.Listener
	client   kubernetes.Interface
	running  sync.WaitGroup

	mu          sync.Mutex
	closed      bool
	connections map[net.Conn]struct{}
}

func startService(address string, client kubernetes.Interface) (*service, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("the extenders' service: %w", err)
	}
	s := &service{listener: listener, client: client, connections: map[net.Conn]struct{}{}}
	s.running.Go(s.accept)
	return s, nil
}

func (s *service) accept() {
	for {
		connection, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.running.Go(func() { s.forward(connection) })
	}
}

func (s *service) forward(from net.Conn) {
	if !s.track(from) {
		return
	}
	defer s.drop(from)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	address, err := published(ctx, s.client)
	if err != nil {
		return
	}
	to, err := net.Dial("tcp", address)
	if err != nil || !s.track(to) {
		return
	}
	defer s.drop(to)
	// When one side closes, both are closed.
	s.running.Go(func() {
		_, _ = io.Copy(to, from)
		s.drop(to)
		s.drop(from)
	})
	_, _ = io.Copy(from, to)
}

// track adds a connection to those that close closes. If the service is closed already, it closes the connection and
// returns false.
func (s *service) track(connection net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = connection.Close()
		return false
	}
	s.connections[connection] = struct{}{}
	return true
}

func (s *service) drop(connection net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.connections, connection)
	_ = connection.Close()
}

func (s *service) close() error {
	err := s.listener.Close()
	s.mu.Lock()
	s.closed = true
	for connection := range s.connections {
		_ = connection.Close()
	}
	s.mu.Unlock()
	s.running.Wait()
	return err
}

// published returns the port that the EndpointSlice names, on this machine's loopback.
func published(ctx context.Context, client kubernetes.Interface) (string, error) {
	slice, err := client.DiscoveryV1().EndpointSlices("kube-system").Get(ctx, "gpushare-extender", metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if len(slice.Endpoints) != 1 || len(slice.Ports) != 1 || slice.Ports[0].Port == nil {
		return "", fmt.Errorf("the EndpointSlice names %d endpoints and %d ports, want one each", len(slice.Endpoints), len(slice.Ports))
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(int(*slice.Ports[0].Port))), nil
}
