// Command kubetools is a whole Kubernetes control plane, node and its clients in one binary: etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl and helm, picked by the name it is run under
// (argv[0]). They share nearly all of their code, so one is a fraction of eight: less to link, to keep and to page in.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	_ "time/tzdata" // CronJob time zones, as upstream's own mains have it

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	daemons := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllermanager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
		"kube-proxy":              kubeproxy.NewProxyCommand,
	}
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kubectl":
		logs.GlogSetter(kubectl.GetLogVerbosity(os.Args)) // before construction: that already logs (plugins, .kuberc)
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			util.CheckErr(err)
		}
	case "helm":
		os.Exit(runHelm())
	default:
		command, ok := daemons[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "kubetools: %q is none of its names; run it through a link named kube-apiserver, "+
				"kube-controller-manager, kube-scheduler, kubelet, kube-proxy, kubectl, helm or etcd\n", name)
			os.Exit(64)
		}
		os.Exit(cli.Run(command()))
	}
}

func runHelm() int {
	kube.ManagedFieldsManager = "helm" // the field manager's name stays, whatever this binary is called
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		slog.Warn("command failed", slog.Any("error", err))
		return 1
	}
	if err := command.Execute(); err != nil {
		var failed helm.CommandError
		if errors.As(err, &failed) {
			return failed.ExitCode
		}
		return 1
	}
	return 0
}
