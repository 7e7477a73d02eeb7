package controlplane

import (
	"context"
	"fmt"
	"path/filepath"
)

// The components' names, as their binaries are called and as Options.ExtraArgs knows them.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	scheduler         = "kube-scheduler"
	controllerManager = "kube-controller-manager"
)

// components are the names of what is to run.
func (o Options) components() []string {
	names := []string{etcd, apiServer}
	if !o.WithoutScheduler {
		names = append(names, scheduler)
	}
	if o.ControllerManager {
		names = append(names, controllerManager)
	}
	return names
}

// process returns a component that isn't started yet.
func (c *ControlPlane) process(name, readyURL string, args ...string) *Process {
	return &Process{
		Name:    name,
		Path:    filepath.Join(c.options.KubeDir, name),
		Args:    append(args, c.options.ExtraArgs[name]...),
		LogPath: filepath.Join(c.Dir, "logs", name+".log"),
		Ready:   HTTPReady(readyURL),
	}
}

func (c *ControlPlane) startEtcd(ctx context.Context) error {
	peers, err := c.reservePort()
	if err != nil {
		return err
	}
	clients := c.etcdPort
	c.Etcd = c.process(etcd, clients.URL("http")+"/readyz",
		"--name=gpushare",
		"--data-dir="+filepath.Join(c.Dir, "etcd"),
		// The data needs to outlive a killed process, not a power cut: the kernel keeps what was written without fsync.
		"--unsafe-no-fsync",
		"--listen-client-urls="+clients.URL("http"),
		"--advertise-client-urls="+clients.URL("http"),
		"--listen-peer-urls="+peers.URL("http"),
		"--initial-advertise-peer-urls="+peers.URL("http"),
		"--initial-cluster=gpushare="+peers.URL("http"),
		"--log-level=warn",
	)
	return c.Etcd.Start(ctx)
}

func (c *ControlPlane) startAPIServer(ctx context.Context) error {
	args := []string{
		"--etcd-servers=" + c.etcdPort.URL("http"),
		"--bind-address=127.0.0.1",
		"--secure-port=" + c.apiPort.String(),
		// Loopback is refused as an endpoint of Service kubernetes, so that is left without any.
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--tls-cert-file=" + c.files.servingCertificate,
		"--tls-private-key-file=" + c.files.servingKey,
		"--client-ca-file=" + c.files.ca,
		"--authorization-mode=Node,RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + c.files.accountKey,
		"--service-account-key-file=" + c.files.accountPublicKey,
		"--service-cluster-ip-range=10.0.0.0/24",
		"--allow-privileged=true", // as kubeadm does: what shares a node's devices asks for it.
	}
	if !c.options.ControllerManager {
		// Each of the two relies on a controller: one refuses pods until somebody has made the ServiceAccount "default" in
		// their namespace, the other gives each new node a taint that the node lifecycle controller lifts.
		args = append(args, "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition")
	}
	c.APIServer = c.process(apiServer, c.apiPort.URL("https")+"/readyz", args...)
	return c.APIServer.Start(ctx)
}

// secured are the flags that kube-scheduler and kube-controller-manager share: TLS on a reserved port, and the client
// certificate of system:masters accepted for their metrics.
func (c *ControlPlane) secured(port *Port, kubeconfig string) []string {
	return []string{
		"--bind-address=127.0.0.1",
		"--secure-port=" + port.String(),
		"--tls-cert-file=" + c.files.servingCertificate,
		"--tls-private-key-file=" + c.files.servingKey,
		"--client-ca-file=" + c.files.ca,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authentication-skip-lookup=true",
		"--authorization-kubeconfig=" + kubeconfig,
		"--leader-elect=false",
	}
}

func (c *ControlPlane) startControllerManager(ctx context.Context) error {
	port, err := c.reservePort()
	if err != nil {
		return err
	}
	kubeconfig, err := c.Kubeconfig("system:kube-controller-manager")
	if err != nil {
		return err
	}
	args := append(c.secured(port, kubeconfig),
		"--kubeconfig="+kubeconfig,
		"--use-service-account-credentials=true",
		"--service-account-private-key-file="+c.files.accountKey,
		"--root-ca-file="+c.files.ca,
		// Nodes without a kubelet send no heartbeat. They stay as ready as they were made for longer than any test.
		"--node-monitor-grace-period=24h",
		"--kube-api-qps=1000",
		"--kube-api-burst=1000",
	)
	process := c.process(controllerManager, port.URL("https")+"/healthz", args...)
	if err := process.Start(ctx); err != nil {
		return err
	}
	c.ControllerManager = process
	return c.waitForDefaultAccount(ctx)
}

// StartScheduler starts kube-scheduler with these options, in place of the one that runs, if one does.
func (c *ControlPlane) StartScheduler(ctx context.Context, o SchedulerOptions) error {
	config, err := c.writeSchedulerConfig(o)
	if err != nil {
		return fmt.Errorf("configuring %s: %w", scheduler, err)
	}
	if c.Scheduler == nil {
		port, err := c.reservePort()
		if err != nil {
			return err
		}
		kubeconfig := c.schedulerKubeconfig
		args := append([]string{"--config=" + config}, c.secured(port, kubeconfig)...)
		c.Scheduler = c.process(scheduler, port.URL("https")+"/readyz", args...)
	}
	return c.Scheduler.Restart(ctx)
}
